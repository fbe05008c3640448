"""Captured passes draw new numbers in each replay, as eager would, and gradients follow them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plantune import optimize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU"),
    pytest.mark.filterwarnings("ignore::plantune.runtime.load.TrainingMode"),
]
REPLAYS = 4


class Net(nn.Module):
    """A function of a module and its input."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self._forward_of = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self._forward_of(self, x)


@torch.library.custom_op("plantune_gpu_tests::spoiled", mutates_args=())
def spoiled(x: Tensor) -> tuple[Tensor, Tensor]:
    noise = torch.rand_like(x)
    return x * noise, noise


@spoiled.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


spoiled.register_autograd(
    lambda ctx, dy, _: dy * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


def attention(m: nn.Module, x: Tensor) -> Tensor:
    q = m.layer(x).unflatten(-1, (4, 16)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.4)


def depth(m: nn.Module, x: Tensor) -> Tensor:
    y = m.layer(x)
    return x + y * y.new_empty((len(y), 1, 1)).bernoulli_(0.5).div_(0.5)


NETS = {
    "dropout": lambda: Net(lambda m, x: F.dropout(m.layer(x), 0.3), layer=nn.Linear(64, 64)),
    "gumbel": lambda: Net(lambda m, x: F.gumbel_softmax(m.layer(x)), layer=nn.Linear(64, 64)),
    "noise": lambda: Net(lambda m, x: m.layer(x) + torch.rand_like(x), layer=nn.Linear(64, 64)),
    "attention": lambda: Net(attention, layer=nn.Linear(64, 64)),
    "stochastic depth": lambda: Net(depth, layer=nn.Linear(64, 64)),
    "encoder": lambda: nn.TransformerEncoderLayer(64, 4, 32, 0.2),
}


def inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(8, 16, 64, device="cuda", dtype=dtype)


def near(found: Tensor, wanted: Tensor) -> None:
    assert (found - wanted).norm() <= 5e-3 * wanted.norm() + 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
def test_inference_after_a_seed_is_eagers(make, dtype):
    module, x = make().cuda().to(dtype).train(), inputs(dtype)
    tuned = optimize(module, x)
    with torch.no_grad():
        for seed in (1, 2):
            found, wanted = [], []
            for model, made in ((tuned, found), (module, wanted)):
                torch.cuda.manual_seed(seed)
                made += [model(x).float() for _ in range(REPLAYS)]
                made.append(torch.rand(3, device="cuda"))
            for own, their in zip(found, wanted, strict=True):
                near(own, their)
            assert not torch.equal(found[0], found[1])
    assert tuned.last_call().how == "captured"


@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
def test_training_after_a_seed_is_eagers(make):
    module = make().cuda().train()
    tuned, reference = optimize(module, inputs(), mode="train"), copy.deepcopy(module)
    for seed in range(REPLAYS):  # gradients add up
        x = inputs()
        for model in (tuned, reference):
            torch.cuda.manual_seed(seed)
            y = model(x)
            dy = torch.arange(y.numel(), device="cuda").view(y.shape).sin()
            y.backward(dy, retain_graph=True)
            y.backward(dy)
    for own, their in zip(tuned.parameters(), reference.parameters(), strict=True):
        near(own.grad, their.grad)
    assert tuned.last_call().how == "captured"


MASKED = {
    "dropout": lambda m, x: F.dropout(x, 0.3),
    "custom op": lambda m, x: spoiled(x)[0],
    "channels": lambda m, x: F.dropout2d(x[..., None], 0.3),
}


@pytest.mark.parametrize("forward", MASKED.values(), ids=MASKED)
def test_the_gradient_is_of_the_mask_that_the_output_shows(forward):
    tuned = optimize(Net(forward).train(), inputs().requires_grad_(), mode="train")
    x, total, seen = torch.ones(8, 16, 64, device="cuda", requires_grad=True), 0.0, []
    for _ in range(REPLAYS):
        y = tuned(x)
        y.sum().backward()
        total = total + y.detach().reshape(x.shape)
        seen.append(y.detach())
    torch.testing.assert_close(x.grad, total)
    assert all(not torch.equal(a, b) for a, b in pairwise(seen))
    assert tuned.last_call().how == "captured"


def test_the_attention_that_the_gradient_is_of():
    """With values that are the unit matrix the output shows the weights that were kept, and the
    gradient of the values is their transpose times that of the output.
    """
    forward = lambda m, x: F.scaled_dot_product_attention(x, x, m.values, dropout_p=0.4)  # noqa: E731
    module = Net(forward).cuda().train()
    module.values = nn.Parameter(torch.eye(64, device="cuda").repeat(2, 4, 1, 1).half())
    x = torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.float16)
    tuned = optimize(module, x, mode="train")
    for _ in range(REPLAYS):
        tuned.zero_grad()
        kept = tuned(x)
        dy = torch.randn_like(kept)
        kept.backward(dy)
        wanted = kept.detach().float().mT @ dy.float()
        assert (tuned.values.grad.float() - wanted).norm() <= 1e-2 * wanted.norm()
        assert 0.3 < float((kept == 0).float().mean()) < 0.5
    assert tuned.last_call().how == "captured"


def test_statistics():
    tuned = optimize(Net(lambda m, x: F.dropout(x, 0.25)).train(), inputs())
    x, kept = torch.ones(8, 16, 64, device="cuda"), torch.zeros(8, 16, 64, device="cuda")
    runs = 400
    with torch.no_grad():
        for _ in range(runs):
            kept += tuned(x) > 0
    chance = kept / runs
    assert abs(float(chance.mean()) - 0.75) < 0.002
    assert float(chance.min()) > 0.6
    assert float(chance.max()) < 0.9
    assert float(chance.std()) == pytest.approx((0.25 * 0.75 / runs) ** 0.5, rel=0.1)


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_recurrent_layers_drop_other_units_in_each_replay(mode):
    """cuDNN has a generator of its own, which no seed sets."""
    layer = nn.LSTM(64, 32, 2, dropout=0.5).cuda().train()
    net = Net(lambda m, x: m.layer(x)[0], layer=layer).train()
    tuned, x, made = optimize(net, inputs(), mode=mode), inputs(), []
    for _ in range(REPLAYS):
        with torch.set_grad_enabled(mode == "train"):
            y = tuned(x)
        made.append(y.detach())
        if mode == "train":
            tuned.zero_grad()
            y.sum().backward()
            assert all(bool(p.grad.isfinite().all()) and p.grad.any() for p in tuned.parameters())
    assert all(not torch.equal(a, b) for a, b in pairwise(made))
    assert tuned.last_call().how == "captured"


def test_recurrent_layers_drop_other_units_in_each_instance():
    """Passes that wait for their backward pass have graphs of their own."""
    layer = nn.LSTM(64, 32, 2, dropout=0.5).cuda().train()
    net = Net(lambda m, x: m.layer(x)[0], layer=layer).train()
    tuned, x = optimize(net, inputs(), mode="train"), inputs()
    made = [tuned(x) for _ in range(REPLAYS)]
    assert all(not torch.equal(a, b) for a, b in pairwise(made))
    made[-1].sum().backward()
    assert all(bool(p.grad.isfinite().all()) and p.grad.any() for p in tuned.parameters())


def test_recurrent_layers_count_in_memory_of_their_own():
    """torch gives the old one away when its generator was seeded and eager runs such a layer."""
    layer = nn.LSTM(64, 32, 2, dropout=0.5).cuda().train()
    tuned, x = optimize(Net(lambda m, x: m.layer(x)[0], layer=layer).train(), inputs()), inputs()
    with torch.no_grad():
        tuned(x)
        torch.manual_seed(3)
        layer(x)
        torch.cuda.synchronize()
        like = torch._cudnn_init_dropout_state(0.5, True, 1, dtype=torch.uint8, device="cuda")
        others = [torch.zeros_like(like) for _ in range(8)]
        made = [tuned(x) for _ in range(REPLAYS)]
    assert all(not torch.equal(a, b) for a, b in pairwise(made))
    assert not any(bool(other.any()) for other in others)


def test_inside_of_a_callers_graph():
    tuned, x = optimize(Net(lambda m, x: F.dropout(x)).train(), inputs()), inputs()
    with torch.no_grad():
        tuned(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = tuned(x)
    seen = []
    for _ in range(REPLAYS):
        graph.replay()
        seen.append(y.clone())
    assert all(not torch.equal(a, b) for a, b in pairwise(seen))


def test_images_in_channels_last():
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Dropout(0.4), nn.Conv2d(16, 8, 3), nn.Dropout2d())
    net = net.cuda().half().to(memory_format=torch.channels_last).train()
    x = (
        torch.randn(4, 3, 16, 16, device="cuda")
        .half()
        .contiguous(memory_format=torch.channels_last)
    )
    for mode in ("infer", "train"):
        tuned = optimize(net, x, mode=mode)
        made = [tuned(x) for _ in range(REPLAYS)]
        assert all(not torch.equal(a, b) for a, b in pairwise(made))
        assert tuned.last_call().how == "captured"
