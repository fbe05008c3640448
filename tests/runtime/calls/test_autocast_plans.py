"""A call under autocast is a problem of its own, with the casts among its steps."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plantune import UnplannedCall, optimize
from plantune.graph.tracing.arguments import Arguments
from plantune.graph.tracing.autocast import casts
from plantune.graph.tracing.extract import extract_with_outputs
from plantune.runtime.proof.recheck import recheck
from plantune.runtime.watched.copies import copied

# Of the default plan's, which the tests let run in place of eager.
PLANNED = "planned"


class Mixed(nn.Module):
    """Products, norms, a region of its own, and two dtypes that meet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.linear, self.scale = nn.Linear(64, 8), nn.Parameter(torch.ones(8))
        self.last = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(F.relu(self.norm(self.conv(x))).flatten(1))
        with torch.autocast("cpu", enabled=False):
            z = self.last(y.float() * self.scale)
        return F.softmax(y, -1), torch.cat([y, z], 1) @ torch.cat([z, y], 1).T


@pytest.fixture
def module(randomise):
    return randomise(Mixed()).eval()


@pytest.fixture
def x():
    return torch.randn(2, 3, 6, 6)


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnplannedCall)
        yield


def autocast(dtype=torch.bfloat16, **options):
    return torch.autocast("cpu", dtype, **options)


def first_result(module, x, mode, cast):
    """The first result under autocast and, in training, the gradients that follow from it."""
    with cast, torch.set_grad_enabled(mode == "train"):
        y = module(x)[0]
    if mode != "train":
        return [y]
    y.float().square().sum().backward()
    return [y, *(p.grad for p in module.parameters())]


def near(ours, theirs):
    assert [y.dtype for y in ours] == [y.dtype for y in theirs]
    for own, their in zip(ours, theirs, strict=True):
        assert (own - their).float().norm() <= 1e-2 * their.float().norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inference(dtype, module, x):
    model = optimize(module, x)
    with torch.no_grad(), autocast(dtype):
        for other in torch.randn(3, 2, 3, 6, 6):
            near(model(other), module(other))
            assert model.last_call().how == PLANNED
    near(model(x), module(x))
    assert model.stats().instances == 2


def test_training(module, x):
    module.train()
    model, reference = optimize(module, x, mode="train"), copy.deepcopy(module)
    found = []
    for m in (model, reference):
        with autocast():
            outputs = m(x)
            loss = sum((y.float() * torch.arange(y.numel()).view(y.shape)).sum() for y in outputs)
        loss.backward()
        found.append([*outputs, *(p.grad for p in m.parameters()), m.norm.running_mean])
    assert model.last_call().how == PLANNED
    near(*found)
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_a_step_of_the_optimizer_inside_of_one_region(module, x):
    """The cast weights of the call before are never used again."""
    module.train()
    model, reference = optimize(module, x, mode="train"), copy.deepcopy(module)
    losses = []
    for m in (model, reference):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.5)
        # Torch itself would keep its casts until the region ends.
        with autocast(cache_enabled=False):
            for _ in range(3):
                optimizer.zero_grad()
                loss = m(x)[0].float().square().sum()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    assert model.last_call().how == PLANNED
    assert len({round(loss, 3) for loss in losses[:3]}) > 1
    assert losses[:3] == pytest.approx(losses[3:], rel=2e-2)


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(x), labels)


def test_a_loss_of_whose_parts_a_gpu_casts_some():
    """There log_softmax is told its dtype, and nll_loss is computed in float32."""
    module = Loss()
    call = Arguments.of(module, (torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])), {})
    graph = extract_with_outputs(module, replace(call, autocast=("cuda", torch.float16)))[0]
    made = [(node.op, node.types[0].dtype) for node in graph.nodes]
    assert made[-3:] == [
        ("aten.log_softmax.int", "float16"),
        ("cast", "float32"),
        ("aten.nll_loss.default", "float32"),
    ]


class Region(nn.Module):
    """Opens its own region, as trainers wrap a forward in one; what follows is outside of it."""

    def __init__(self, inner) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            y, z = self.inner(x)
        return self.head(y.float()) + z.float().mean(), z


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_a_region_of_the_forwards_own(mode, module, x):
    region = Region(module).train(mode == "train")
    model, reference = optimize(region, x, mode=mode), copy.deepcopy(region)
    for outer in (nullcontext(), autocast(torch.bfloat16)):
        found = [first_result(each, x, mode, outer) for each in (model, reference)]
        near(*found)
        assert model.last_call().how == PLANNED
        assert (found[0][0].dtype == torch.float32) == isinstance(outer, nullcontext)
        for each in (model, reference):
            each.zero_grad()


def test_a_weight_that_changes_inside_of_one_region(module, x):
    model = optimize(module, x)
    with torch.no_grad(), autocast(cache_enabled=False):
        before = model(x)[0]
        model.linear.weight.mul_(-1)
        near(model(x), model.reference(x))
        assert not torch.allclose(model(x)[0], before)


def test_its_plan_is_proved_against_autocasts_own_result(module, x):
    model = optimize(module, x)
    with torch.no_grad(), autocast():
        model(x)
    (kept,) = (p for p in model._calls._table.all_kept() if p.under_autocast)
    (call,) = (key[0] for key, p in model._calls._table.signature.kept.items() if p is kept)
    recheck(kept.pool.checked, module, arguments=call.arguments)


def test_autocast_for_another_kind_of_device_changes_nothing(module, x, close):
    model = optimize(module, x)
    torch.set_autocast_enabled("cuda", True)
    try:
        close(model(x)[0], module(x)[0])
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert model.stats().instances == 1


def test_recurrent_layers_run_in_the_framework_on_a_cpu():
    module, x = nn.GRU(4, 3, batch_first=True).eval(), torch.randn(2, 5, 4)
    model = optimize(module, x, fallback="silent")
    with torch.no_grad(), autocast():
        near([model(x)[0]], [module(x)[0]])
    assert model.last_call().how == "eager"


A, LOW = torch.ops.aten, torch.bfloat16


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


POLICIES = {
    "products": (A.linear.default, (meta(2, 3), meta(4, 3)), (LOW, LOW)),
    "of one that is low already": (
        A.linear.default,
        (meta(2, 3, dtype=LOW), meta(4, 3)),
        (LOW, LOW),
    ),
    "not of double": (
        A.mm.default,
        (meta(2, 3, dtype=torch.float64), meta(3, 3, dtype=torch.float64)),
        (torch.float64, torch.float64),
    ),
    "single precision": (
        A.mse_loss.default,
        (meta(2, dtype=LOW), meta(2, dtype=LOW)),
        (torch.float32, torch.float32),
    ),
    "anything else": (A.relu.default, (meta(2, dtype=LOW),), (LOW,)),
    "no integers": (
        A.embedding.default,
        (meta(5, 3), meta(2, dtype=torch.int64)),
        (torch.float32, torch.int64),
    ),
    "whole numbers of what looks at its device": (
        A.one_hot.default,
        (meta(5, dtype=torch.int64), 4),
        (torch.int64,),
    ),
}


@pytest.mark.parametrize(("overload", "args", "wanted"), POLICIES.values(), ids=POLICIES)
def test_torch_says_what_it_casts(overload, args, wanted):
    assert casts(overload, args, {}, ("cpu", LOW)) == wanted


def test_recurrent_layers_take_all_numbers_in_autocasts_dtype_on_a_gpu():
    x, state, weights = meta(5, 2, 4), meta(1, 2, 3), [meta(9, 4), meta(9, 3), meta(9), meta(9)]
    flags = (True, 1, 0.0, False, False, False)
    found = casts(A.gru.input, (x, state, weights, *flags), {}, ("cuda", torch.float16))
    assert found == (torch.float16,) * 6
    lengths = meta(5, dtype=torch.int64)
    data = (x, lengths, state, weights, *flags[:-1])
    assert casts(A.gru.data, data, {}, ("cuda", LOW)) == (LOW, torch.int64, *(LOW,) * 5)
    double = tuple(leaf.double() for leaf in (x, state)), [leaf.double() for leaf in weights]
    assert set(casts(A.gru.input, (*double[0], double[1], *flags), {}, ("cuda", LOW))) == {
        torch.float64
    }


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_recurrent_layers_on_a_gpu(kind, mode):
    torch.manual_seed(0)
    layer, x = kind(16, 24, num_layers=2).cuda(), torch.randn(5, 3, 16, device="cuda")
    layer.train(mode == "train")
    model = optimize(layer, x, mode=mode)
    found = [first_result(m, x, mode, torch.autocast("cuda")) for m in (model, copied(layer))]
    assert model.last_call().how == "captured"
    assert found[0][0].dtype == torch.float16
    near(*found)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_a_gpu(dtype, mode, module, x):
    module, x = module.cuda().train(mode == "train"), x.cuda()
    model, reference = optimize(module, x, mode=mode), copy.deepcopy(module)
    found = []
    for m in (model, reference):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        with (
            torch.autocast("cuda", dtype, cache_enabled=False),
            torch.set_grad_enabled(mode == "train"),
        ):
            for _ in range(3):
                outputs = m(x)
                if mode == "train":
                    optimizer.zero_grad()
                    outputs[0].float().square().sum().backward()
                    optimizer.step()
        found.append(outputs)
    assert model.last_call().how == "captured"
    near(*found)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.RNN])
@pytest.mark.parametrize("mode", ["infer", "train"])
def test_recurrent_layers_on_a_cpu(kind, mode):
    layer, x = kind(4, 3, num_layers=2), torch.randn(5, 2, 4)
    layer.train(mode == "train")
    with autocast():
        model = optimize(layer, x, mode=mode, fallback="error")
    found = [first_result(m, x, mode, autocast()) for m in (model, copied(layer))]
    assert model.last_call().how == PLANNED
    near(*found)


def test_what_has_no_plan_under_autocast_runs_as_it_is():
    """Of a module that was made inside of autocast, too: that raised."""
    module, x = nn.GRU(4, 3).eval(), torch.randn(5, 2, 4)
    with torch.no_grad(), autocast():
        model = optimize(module, x)
        with pytest.warns(UnplannedCall, match="autocast is on, under which no plan can be"):
            near([model(x)[0]], [module(x)[0]])
