"""Whatever is done to a module between its calls, in whatever order: each call is the reference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from plantune import TunedModule, optimize

from .conftest import SHAPE

Change = Callable[[TunedModule], object]
WEIGHT = torch.linspace(-1, 1, 4 * 8 * 9).view(4, 8, 3, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.last = nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.relu(self.norm(self.conv(x))))


def resize(model: TunedModule) -> None:
    """Its memory may be another's by now, or be elsewhere."""
    weight, storage = model.conv.weight, model.conv.weight.untyped_storage()
    kept, size = weight.clone(), storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    weight.copy_(kept)


def write_unseen(model: TunedModule) -> None:
    model.conv.weight.data.view(-1)[1] += 1
    model.refresh()


CHANGES: dict[str, Change] = {
    "nothing": lambda model: None,
    "a weight in place": lambda model: model.conv.weight.mul_(1.1),
    "a weight's data": lambda model: setattr(model.conv.weight, "data", model.conv.weight * 1.1),
    "another weight": lambda model: setattr(model.last, "weight", nn.Parameter(WEIGHT.clone())),
    "a storage resized": resize,
    "a write that leaves no trace": write_unseen,
    "a statistic in place": lambda model: model.norm.running_mean.add_(0.1),
    "another statistic": lambda model: setattr(model.norm, "running_var", torch.rand(8) + 0.5),
    "another layer": lambda model: setattr(model.reference, "last", nn.Conv2d(8, 4, 3)),
    "another stride": lambda model: setattr(model.conv, "stride", (3 - model.conv.stride[0],) * 2),
    "another mode of a layer": lambda model: model.norm.train(not model.norm.training),
    "another mode of all": lambda model: model.train(not model.training),
    "a hook": lambda model: model.relu.register_forward_hook(lambda layer, x, y: y + 1),
    "no hooks": lambda model: model.relu._forward_hooks.clear(),
    "determinism": lambda model: torch.use_deterministic_algorithms(True),
    "no determinism": lambda model: torch.use_deterministic_algorithms(False),
}  # fmt: skip


@pytest.fixture
def _as_before() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("captured_modules", "_as_before")
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(st.sampled_from(sorted(CHANGES)), max_size=30))
def test_each_call_is_the_references(close: Callable[..., None], changes: list[str]) -> None:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(False)
    model = optimize(Net().eval(), torch.randn(SHAPE), fallback="silent")
    x = torch.randn(SHAPE)
    for change in ["nothing", "nothing", *changes, "nothing"]:
        with torch.no_grad():
            CHANGES[change](model)
            x.normal_()
            other = copy.deepcopy(model.reference)
            close(model(x), other(x))
        for ours, theirs in zip(model.buffers(), other.buffers(), strict=True):
            close(ours, theirs)
