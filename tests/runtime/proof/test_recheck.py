"""A plan from elsewhere must compute the network here before it is used."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plantune import load_model, optimize
from plantune.devices.machine import cpu_environment
from plantune.errors import CannotJudge, WrongResult
from plantune.kernels import torch_ops
from plantune.models.se_resnet9 import SEResNet9Fixup
from plantune.plans.checked_plan import check_plan
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.proofs import remember_proof
from plantune.plans.guess import hand_plan
from plantune.runtime.calls.choose import NoStoredPlan
from plantune.runtime.program.program import Program
from plantune.runtime.proof import cases as cases_module
from plantune.runtime.proof import recheck as recheck_module
from plantune.runtime.proof.distances import Distance, Pooled
from plantune.runtime.proof.recheck import recheck
from plantune.space.search_space import load_search_space

NAME = "se_resnet9_fixup"
SPACE = load_search_space("cpu")


@pytest.fixture
def fixup():
    """As before training: the second convolutions are zero, and hide what goes wrong there."""
    return SEResNet9Fixup(3, base_planes=16).eval()


def checked(module, x, mode="infer"):
    pool = optimize(module.train(mode == "train"), x, mode=mode).pool()
    recheck(pool.checked, module.train(mode == "train"))


@pytest.fixture
def broken_sigmoid(monkeypatch):
    """A kernel that is off by a hundredth, where zeros follow in a fresh Fixup network."""

    def write(node, y):
        return lambda x: torch.sigmoid(x, out=y).mul_(1.01)

    monkeypatch.setitem(torch_ops.WRITERS, "sigmoid", write)


def scaled_relu(monkeypatch, change):
    """A kernel for ReLU that does something else with its result."""

    def write(node, y):
        return lambda x: change(torch.clamp(x, min=0, out=y))

    monkeypatch.setitem(torch_ops.WRITERS, "relu", write)


def two_layers(gain=1.0):
    """Two convolutions, the second one's result multiplied by `gain`."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(3, 16, 3)
            self.second = nn.Conv2d(16, 16, 3)

        def forward(self, x):
            return self.second(torch.relu(self.first(x)) * gain)

    return Net()


@pytest.fixture(params=["cpu", "cuda"])
def reference_of(request, monkeypatch):
    """The reference is computed as it is on that kind of device."""
    wider, place = cases_module._wider, torch.device(request.param)
    monkeypatch.setattr(cases_module, "_wider", lambda graph, device: wider(graph, place))


DTYPES = {torch.float32: 1e-4, torch.float16: 0.003, torch.bfloat16: 0.02}


@pytest.mark.usefixtures("reference_of")
class TestBound:
    """At most twice the framework's own error, and next to nothing beside it."""

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("gain", [1.0, 3e3], ids=["plain", "large"])
    def test_a_right_plan_passes(self, images, dtype, gain):
        checked(two_layers(gain).to(dtype), images.to(dtype))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("gain", [1.0, 3e3], ids=["plain", "large"])
    def test_a_small_mistake_is_found(self, images, monkeypatch, dtype, gain):
        scaled_relu(monkeypatch, lambda y: y.mul_(1 + DTYPES[dtype]))
        with pytest.raises(WrongResult, match="output 0 is off by"):
            checked(two_layers(gain).to(dtype), images.to(dtype))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_one_wrong_element_is_found(self, images, monkeypatch, dtype):
        scaled_relu(monkeypatch, lambda y: y.view(-1)[7].add_(1.0))
        with pytest.raises(WrongResult, match="output 0 is off by"):
            checked(two_layers().to(dtype), images.to(dtype))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_what_is_not_finite_is_wrong_where_the_network_is(
        self, images, monkeypatch, dtype, value
    ):
        scaled_relu(monkeypatch, lambda y: y.view(-1)[7].fill_(value))
        with pytest.raises(WrongResult, match="output 0 is off by inf"):
            checked(two_layers().to(dtype), images.to(dtype))

    def test_a_small_output_is_not_judged_by_a_large_one(self, images, monkeypatch):
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv2d(3, 8, 3)

            def forward(self, x):
                y = self.conv(x)
                return y * 1e4, torch.relu(y) * 1e-4

        scaled_relu(monkeypatch, lambda y: y.mul_(1.001))
        with pytest.raises(WrongResult, match="output 1 is off by"):
            checked(Two(), images)


@pytest.mark.usefixtures("reference_of")
class TestOverflow:
    """The plan is judged on data on which the framework is finite, or not at all."""

    @pytest.mark.parametrize("gain", [1e5, 1e7])
    def test_a_right_plan_of_a_network_that_overflows_passes(self, images, gain):
        checked(two_layers(gain).half(), images.half())

    def test_so_does_one_whose_gradients_alone_overflow(self):
        class Shifted(nn.Module):
            def __init__(self):
                super().__init__()
                self.shift = nn.Parameter(torch.ones(1))

            def forward(self, x):
                return (x + self.shift) * 4096

        checked(Shifted().half(), torch.randn(512, 512).half(), mode="train")

    @pytest.mark.parametrize("gain", [1e5, 1e7])
    def test_a_wrong_one_is_found(self, images, monkeypatch, gain):
        scaled_relu(monkeypatch, lambda y: y.mul_(1.01))
        with pytest.raises(WrongResult, match="output 0 is off by"):
            checked(two_layers(gain).half(), images.half())

    def test_where_nothing_is_finite_it_says_so(self, images):
        with pytest.raises(CannotJudge, match="the framework itself overflows"):
            checked(two_layers(1e12).half(), images.half())


class Cast(nn.Module):
    """Names its dtype, so that it runs in no other."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        return torch.relu(self.conv(x.to(torch.bfloat16)))


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_a_module_that_names_its_dtype_is_proved_by_its_graph(images, monkeypatch, mode):
    checked(Cast().bfloat16(), images.bfloat16(), mode)
    scaled_relu(monkeypatch, lambda y: y.mul_(1.02))
    with pytest.raises(WrongResult, match="output 0 is off by"):
        checked(Cast().bfloat16(), images.bfloat16(), mode)


def test_gradients_are_proved_too(fixup, images, monkeypatch):
    def write(node, dx):
        return lambda dy, y: torch.mul(dy, y > 0, out=dx).mul_(1.3)

    checked(fixup, images, "train")
    monkeypatch.setitem(torch_ops.WRITERS, "relu_grad", write)
    with pytest.raises(WrongResult, match=r"the gradient of .* is off by"):
        checked(fixup, images, "train")


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 1e-2), ("float16", 0.0)])
def test_a_chaotic_gradient_of_the_frameworks_excuses_no_other(dtype, allowed):
    layer = nn.Linear(4, 4).to(getattr(torch, dtype))
    graph = optimize(layer, torch.randn(2, 4, dtype=layer.weight.dtype), mode="train").pool().graph
    found = {"the gradient of a": Pooled.of((0.0, 0.25, 1.0), 0.0), "output 0": Distance(0, 1, 0)}
    jump = recheck_module._worst_jump(graph, found)
    assert jump("the gradient of b") == allowed
    assert jump("output 0") == 0


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_a_right_plan_passes(fixup, images, mode):
    checked(fixup, images, mode)


@pytest.mark.usefixtures("broken_sigmoid")
@pytest.mark.parametrize("mode", ["infer", "train"])
def test_a_mistake_that_first_weights_hide_is_found(fixup, images, mode):
    with pytest.raises(WrongResult, match=r"output 0 is off by .* allowed"):
        checked(fixup, images, mode)


def test_several_outputs_and_statistics(images):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x):
            y = self.norm(x)
            return y, torch.relu(y)

    checked(Two(), images, "train")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_statistics_that_a_pass_moves_are_proved_too(images, monkeypatch, dtype):
    """In the reference's own dtype, too, the reference has buffers of its own."""
    images = images.to(dtype)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=0.1)).to(dtype)
    pool = optimize(net.train(), images, mode="train").pool()
    write = Program.run_forward

    def off(program):
        write(program)
        name = next(name for name, _ in program.graph.updates if "running_var" in name)
        program.values[name].mul_(1.01)

    recheck(pool.checked, net)
    monkeypatch.setattr(Program, "run_forward", off)
    with pytest.raises(WrongResult, match=r"the new value of 1\.running_var is off by"):
        recheck(pool.checked, net)


def test_a_gradient_that_is_rounding_alone(monkeypatch):
    """A bias before a batch norm: sums in another order are no fault, half a sum is one."""
    module = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.SiLU())
    net = nn.Sequential(*module, nn.Conv2d(16, 8, 3), nn.BatchNorm2d(8), nn.SiLU())
    x = torch.randn(16, 3, 16, 16)
    pool = optimize(net, x, mode="train").pool()
    recheck(check_plan(hand_plan(pool.graph, SPACE, network="hand"), pool.graph, SPACE), net)
    made = torch_ops.WRITERS["sum"]

    def write(node, y):
        run = made(node, y)
        return lambda dy: run(torch.cat((dy[:8], torch.zeros_like(dy[8:]))))

    monkeypatch.setitem(torch_ops.WRITERS, "sum", write)
    with pytest.raises(WrongResult, match=r"the gradient of \d\.bias is off"):
        recheck(pool.checked, net)


@pytest.mark.parametrize(
    ("narrow", "mode", "width"),
    [
        (torch.bfloat16, "train", torch.float32),
        (torch.bfloat16, "infer", torch.float64),
        (torch.float32, "train", torch.float64),
    ],
    ids=str,
)
def test_under_wide_norms_training_has_references_in_float32(
    images: Tensor,
    monkeypatch: pytest.MonkeyPatch,
    narrow: torch.dtype,
    mode: str,
    width: torch.dtype,
) -> None:
    """On a GPU, if all results follow from 16 bits: in float64 they take most of its memory."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3).to(narrow), nn.BatchNorm2d(8), nn.ReLU())
    judge, seen = recheck_module.judgeable, set[torch.dtype]()
    wider, images = cases_module._wider, images.to(narrow)
    monkeypatch.setattr(cases_module, "_wider", lambda graph, _: wider(graph, torch.device("cuda")))

    def noted(*given: Any) -> cases_module.Case:
        case = judge(*given)
        seen.update(value.dtype for value in case.exact.values())
        return case

    monkeypatch.setattr(recheck_module, "judgeable", noted)
    checked(net, images, mode)
    assert seen == {width}
    scaled_relu(monkeypatch, lambda y: y.mul_(1.1))
    with pytest.raises(WrongResult, match="is off by"):
        checked(net, images, mode)


def test_the_module_and_the_users_random_numbers_stay(fixup, images):
    before, state = copy.deepcopy(fixup.state_dict()), torch.get_rng_state()
    checked(fixup, images)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in fixup.state_dict().items())


class TestLoading:
    @pytest.fixture
    def store(self):
        def put(**changes):
            plan = load_model(NAME, batch=1, fallback="silent").plan
            with PlanDatabase.open() as database:
                database.put_plan(plan, replace(cpu_environment(), **changes))
            return plan

        return put

    def said(self):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = load_model(NAME, batch=1)
            with torch.no_grad():
                model(torch.randn(1, 3, 64, 64))
        return [(item.category, str(item.message)) for item in caught]

    @pytest.mark.usefixtures("broken_sigmoid")
    @pytest.mark.parametrize("change", [{"torch": "2.0.0"}, {}], ids=str)
    def test_a_wrong_one_is_passed_over(self, store, change):
        store(**change)
        ((category, message),) = self.said()
        assert category is NoStoredPlan
        assert "cannot run here" in message
        assert "off by" in message

    @pytest.mark.usefixtures("broken_sigmoid")
    def test_one_that_was_measured_here_was_checked_then(self, store):
        remember_proof(store(), cpu_environment())
        assert self.said() == []


class Shared(nn.Module):
    """One layer under two names, and one weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again, self.tied = self.first, nn.Linear(4, 4)
        self.tied.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(torch.relu(self.again(torch.relu(self.first(x)))))


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_a_submodule_with_two_names_can_be_proved(mode: str) -> None:
    module = Shared().train(mode == "train")
    pool = optimize(module, torch.randn(3, 4), mode=mode).pool()
    recheck(pool.checked, module)


def test_the_reference_is_in_rows_though_its_1x1_filters_are_channels_last() -> None:
    """By the strides of such a filter alone torch would compute the whole network in channels_last,
    in which its gradient of a padded average pool is wrong on a GPU.
    """
    seen = []

    class Seen(nn.AvgPool2d):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.stride())
            return super().forward(x)

    module = nn.Sequential(nn.Conv2d(4, 8, 1), Seen(3, 2, 1)).to(memory_format=torch.channels_last)
    checked(module, torch.randn(2, 4, 6, 6), "train")
    assert seen[-1] == (8 * 36, 36, 6, 1)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_parameters_without_elements_are_in_no_ones_way() -> None:
    module = nn.Sequential(nn.Linear(4, 0), nn.Linear(0, 3))
    checked(module, torch.randn(2, 4), "train")
