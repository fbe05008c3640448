"""A plan is not refused for what the framework's own kernels and roundings do, and for no more."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from plantune import optimize
from plantune.errors import WrongResult
from plantune.kernels import torch_ops
from plantune.plans.checked_plan import check_plan
from plantune.plans.guess import CHANNELS_LAST, compose, framework_plan, hand_plan
from plantune.runtime.proof import recheck as recheck_module
from plantune.runtime.proof import roundings
from plantune.runtime.proof.cases import rounded
from plantune.runtime.proof.recheck import recheck
from plantune.runtime.proof.roundings import _shaking, eager_again, other_roundings
from plantune.space.search_space import load_search_space

SPACE = load_search_space("cpu")


class Block(nn.Module):
    """The first of a ResNet's stage."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.down = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, 2, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, x):
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + self.down(x))


def graph_of(module, x, mode="train"):
    return optimize(module, x, mode=mode).pool().graph


@pytest.fixture
def alone(monkeypatch):
    """The first bound alone."""
    monkeypatch.setattr(recheck_module, "other_roundings", lambda *given: iter(()))


@pytest.fixture
def channels_last():
    """A batch norm in training whose kernels are those for channels_last, 70 times less exact."""
    norm, x = nn.Sequential(nn.BatchNorm2d(16), nn.ReLU()).train(), torch.randn(64, 16, 14, 14)
    graph = graph_of(norm, x)
    plan = compose(graph, SPACE, network="norm", preferences=CHANNELS_LAST)
    return check_plan(plan, graph, SPACE), norm


def test_the_frameworks_kernels_in_the_other_layout(channels_last):
    recheck(*channels_last)


@pytest.mark.usefixtures("alone")
def test_by_the_first_layout_alone_they_are_refused(channels_last):
    with pytest.raises(WrongResult, match=r"is off by .*e-0[67] of its size"):
        recheck(*channels_last)


def test_where_the_first_bound_holds_nothing_else_is_computed(monkeypatch):
    monkeypatch.setattr(recheck_module, "other_roundings", lambda *given: pytest.fail("asked"))
    layer, x = nn.Linear(3, 4), torch.randn(8, 3)
    graph = graph_of(layer, x)
    recheck(check_plan(framework_plan(graph, SPACE, network="layer"), graph, SPACE), layer)


@pytest.mark.parametrize("plan", ["nchw", "nhwc"])
def test_a_block_of_one_pixel_whose_gradient_torch_leaves_unwritten(plan):
    torch.manual_seed(0)
    block, x = Block(64, 128).bfloat16().train(), torch.randn(2, 64, 1, 1).bfloat16()
    graph = graph_of(block, x)
    preferences = CHANNELS_LAST if plan == "nhwc" else ()
    made = compose(graph, SPACE, network="block", preferences=preferences)
    recheck(check_plan(made, graph, SPACE), block)


def test_winograd_before_a_norm_of_one_pixel():
    """A norm of numbers that are almost equal divides by next to nothing."""
    layers = nn.Sequential(
        nn.Conv2d(16, 16, 3, 1, 1), nn.GroupNorm(8, 16), nn.ReLU(), nn.Conv2d(16, 8, 3, 1, 1)
    ).eval()
    graph = graph_of(layers, torch.randn(2, 16, 1, 1), mode="infer")
    recheck(check_plan(hand_plan(graph, SPACE, network="norm"), graph, SPACE), layers)


def test_a_graph_that_is_not_the_networks_excuses_nothing():
    """What its ops make is compared with what they mean, not with the network."""

    class Scaled(nn.Module):
        def __init__(self, by):
            super().__init__()
            self.norm, self.by = nn.BatchNorm2d(8), by

        def forward(self, x):
            return self.norm(x) * self.by

    graph = graph_of(Scaled(1.001).train(), torch.randn(8, 8, 4, 4))
    plan = framework_plan(graph, SPACE, network="other")
    with pytest.raises(WrongResult, match=r"output 0 is off by 0\.001"):
        recheck(check_plan(plan, graph, SPACE), Scaled(1.0).train())


def test_a_result_that_is_far_off_is_refused_after_few_others(monkeypatch):
    seen, plain = [], recheck_module.widened
    monkeypatch.setattr(recheck_module, "widened", lambda *d: seen.append(d) or plain(*d))
    monkeypatch.setitem(
        torch_ops.WRITERS, "relu", lambda node, y: lambda x: torch.clamp(x, min=0.5, out=y)
    )
    layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).eval()
    graph = graph_of(layers, torch.randn(8, 3), mode="infer")
    with pytest.raises(WrongResult):
        recheck(check_plan(framework_plan(graph, SPACE, network="layers"), graph, SPACE), layers)
    both = 2  # the output by norm, and its worst element
    assert len(seen) == both * recheck_module.DRAWS * recheck_module.SOME


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_random_rounding_is_as_large_as_a_rounding(dtype):
    """By norm: one number of twelve moves by one step."""
    random = torch.Generator().manual_seed(0)
    exact = 1 + 0.9 * torch.rand(100_000, generator=random, dtype=torch.float64)
    stored = exact.to(dtype)
    moved = rounded(stored, random)
    assert moved.dtype == dtype
    off, own = (a.double() - b.double() for a, b in ((moved, stored), (stored, exact)))
    assert 0.7 < float(off.norm() / own.norm()) < 1.5
    steps = off.abs() / torch.finfo(dtype).eps
    assert float(steps.max()) == 1
    assert 0.07 < float((steps > 0).double().mean()) < 0.1


class TestShaking:
    """What an op makes moves by as much as the bound of its step leaves beside PyTorch's error."""

    @pytest.fixture
    def shaken(self):
        def run(op, value, dtype="float32", place="cpu"):
            type_ = SimpleNamespace(is_float=True, torch_dtype=getattr(torch, dtype))
            graph = SimpleNamespace(types={"y": type_})
            change = _shaking(graph, torch.device(place), torch.Generator().manual_seed(0))
            return change(SimpleNamespace(op=op, inputs=("x",), attrs={}), "y", value)

        return run

    def test_zeros_of_a_relu_stay(self, shaken):
        value = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
        made = shaken("relu", value)
        assert made[0] == 0
        assert 0 < float((made - value).abs().max()) <= 2 * 5e-7

    def test_sums_that_cancel_move_as_the_others_do(self, shaken):
        value = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64)
        made = shaken("conv2d", value)
        assert 0 < abs(float(made[0])) <= 5e-7

    def test_in_16_bits_by_one_rounding(self, shaken):
        value = torch.ones(1000, dtype=torch.float64)
        off = (shaken("conv2d", value, "bfloat16") - value).abs().max()
        assert 0.9 * 2**-8 < float(off) <= 2**-8

    @pytest.mark.parametrize(
        ("place", "precision", "least", "most"),
        [
            ("cuda", "tf32", 0.9 * 2**-11, 2**-11),
            ("cuda", "ieee", 0.0, 5e-7),
            ("cpu", "tf32", 0.0, 5e-7),
        ],
    )
    def test_products_in_tf32_are_off_by_its_rounding(
        self, shaken, monkeypatch, place, precision, least, most
    ):
        """Where the user asked for it: a product alone, and on a GPU."""
        monkeypatch.setattr(roundings, "float32_precisions", lambda: (precision,) * 3)
        value = torch.ones(1000, dtype=torch.float64)
        off = float((shaken("conv2d", value, place=place) - value).abs().max())
        assert least < off <= most
        assert float((shaken("relu", value, place=place) - value).abs().max()) <= 5e-7

    def test_a_view_stays(self, shaken):
        value = torch.ones(3, dtype=torch.float64)
        assert shaken("reshape", value) is value


@pytest.mark.parametrize(("errs", "layouts"), [(False, ["nhwc", "nchw"]), (True, ["nchw"])])
def test_where_torch_errs_in_channels_last_it_is_not_asked(monkeypatch, errs, layouts):
    """As its gradient of padded average pools does on a GPU: off by its own size, it would excuse
    everything.
    """
    asked = []
    monkeypatch.setattr(roundings, "errs_in_channels_last", lambda node: errs)
    monkeypatch.setattr(roundings, "exact_of_graph", lambda *given: {})
    monkeypatch.setattr(roundings, "op_by_op", lambda *given: asked.append(given[4]) or {})
    graph = graph_of(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.randn(2, 3, 6, 6))
    case = SimpleNamespace(inputs=(torch.zeros(1),), seeds=())
    assert len(list(other_roundings(None, graph, case, None, 0))) == len(layouts)
    assert asked == layouts


def test_eager_again_is_in_both_layouts_and_leaves_the_module_as_it_is():
    module, x = nn.Conv2d(4, 8, 1), torch.randn(2, 4, 1, 1)
    before = module.weight.detach().clone()
    random = torch.Generator().manual_seed(0)
    made = [(m.weight, *given) for m, given in eager_again(module, (x,), random, 2)]
    strides = [(weight.stride(), given.stride()) for weight, given in made]
    last, rows = ((4, 1, 4, 4), (4, 1, 4, 4)), ((4, 1, 1, 1), (4, 1, 1, 1))
    assert strides == [last, rows, last, rows, last]
    assert torch.equal(made[0][0], before)
    assert not any(torch.equal(weight, before) for weight, _ in made[1:])
    assert torch.equal(module.weight, before)
