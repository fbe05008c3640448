"""What the tests of faults on a GPU share: a small network there, and the bounds for its errors."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from plantune import TunedModule, UnplannedCall, optimize
from plantune.devices.machine import arch_of
from plantune.models.se_resnet9 import SEResNet9Fixup
from plantune.plans.guess import framework_plan, hand_plan
from plantune.runtime.calls.choose import PredictedPlan
from plantune.space.search_space import load_search_space

ROUNDINGS = 8


@pytest.fixture
def small(randomise: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return randomise(SEResNet9Fixup(3, base_planes=16)).cuda().half().eval()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 64, 64, device="cuda", dtype=torch.float16)


@pytest.fixture
def planned() -> Iterator[None]:
    """Fails where a call leaves the plan."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnplannedCall)
        yield


def _tuned(
    module: nn.Module, x: Tensor, mode: str = "infer", plan: str = "framework"
) -> TunedModule:
    """`module` optimized with the framework's kernels, or with the plan picked by hand."""
    model = optimize(module.train(mode == "train"), x, mode=mode)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PredictedPlan)
        model.pool()
    space = load_search_space(arch_of(torch.device("cuda")))
    made = {"framework": framework_plan, "hand": hand_plan}[plan]
    picked = made(model.pool().graph, space, network=plan)
    return optimize(module, x, mode=mode, plan=picked)


@pytest.fixture
def tuned() -> Callable[..., TunedModule]:
    return _tuned


def _off(found: Tensor, wanted: Tensor) -> float:
    """The error as a part of the whole."""
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))


@pytest.fixture
def off() -> Callable[[Tensor, Tensor], float]:
    return _off


@torch.no_grad()
def _assert_right(found: Tensor, module: nn.Module, x: Tensor) -> None:
    """By the bound that every kernel is held to."""
    exact = copy.deepcopy(module).double()(x.double())
    allowed = 2 * _off(module(x), exact) + ROUNDINGS * torch.finfo(x.dtype).eps
    assert _off(found, exact) <= allowed


@pytest.fixture
def assert_right() -> Callable[[Tensor, nn.Module, Tensor], None]:
    return _assert_right


def _gradients(module: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    module.zero_grad()
    module(x).backward(dy)
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def _assert_trains(model: nn.Module, module: nn.Module, x: Tensor) -> None:
    """Its gradients err no more than twice as much as the framework's."""
    dy = torch.randn_like(module(x)) / 8
    exact = _gradients(copy.deepcopy(module).double(), x.double(), dy.double())
    assert len(exact) == len(list(module.parameters()))
    theirs = [_off(*pair) for pair in zip(_gradients(module, x, dy), exact, strict=True)]
    ours = [_off(*pair) for pair in zip(_gradients(model, x, dy), exact, strict=True)]
    assert max(ours) <= 2 * max(theirs) + ROUNDINGS * torch.finfo(x.dtype).eps


@pytest.fixture
def assert_trains() -> Callable[[nn.Module, nn.Module, Tensor], None]:
    return _assert_trains
