"""A small network, and training steps as eager takes them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plantune.errors import CaptureError
from plantune.graph.nested import mapped
from plantune.training import replays


@pytest.fixture(autouse=True)
def _alike_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, binaries: Path) -> None:
    """One seed, no plan that somebody stored on this machine, and kernels that were compiled."""
    torch.manual_seed(0)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "cuda").symlink_to(binaries / "cuda")
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(tmp_path / "cache"))


class Small(nn.Sequential):
    """Its last layers see four pixels of an image of 8 by 8."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AvgPool2d(3),
            nn.Flatten(),
            nn.Linear(32, 5),
        )


@pytest.fixture
def model() -> nn.Module:
    return Small()


@pytest.fixture
def batches() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(8, 3, 8, 8), torch.randint(5, (8,))) for _ in range(20)]


def _eager(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    y: Tensor,
    loss: Callable[..., Any] = nn.functional.cross_entropy,
) -> Tensor:
    optimizer.zero_grad()
    value = loss(model(x), y)
    value.backward()
    optimizer.step()
    return value.detach()


@pytest.fixture
def eager() -> Callable[..., Tensor]:
    return _eager


@pytest.fixture
def twin() -> Callable[[nn.Module], nn.Module]:
    return copy.deepcopy


def _assert_alike(model: nn.Module, other: nn.Module) -> None:
    for (name, ours), theirs in zip(
        model.state_dict().items(), other.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture
def assert_alike() -> Callable[[nn.Module, nn.Module], None]:
    return _assert_alike


def _randomise(module: nn.Module) -> nn.Module:
    """No weight is 0 or 1: Fixup's first values would hide a mistake."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.uniform_(0.5, 1.0)
    return module


@pytest.fixture
def randomise() -> Callable[[nn.Module], nn.Module]:
    return _randomise


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if isinstance(value, (int, float))}


class FakeStep:
    """Replays by running the pass on memory of its own, as a graph does, with the optimizer's plain
    numbers as they were.
    """

    made: list[FakeStep]
    failure: str | None = None

    def __init__(
        self, run: Any, update: Any, given: Any, modules: Any, device: Any, *, seen: Any
    ) -> None:
        if self.failure is not None:
            raise CaptureError(self.failure)
        self._run, self._update, self.replayed, self.is_gone = run, update, 0, False
        self._own: list[Tensor] = []
        if update is not None:
            self._numbers = [*map(_plain, update.__self__._optimizer.param_groups)]

        def take(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            self._own.append(leaf.clone())
            return self._own[-1]

        self._given = mapped(take, given)
        self.made.append(self)

    def replay(self, tensors: list[Tensor]) -> Any:
        self.replayed += 1
        for own, tensor in zip(self._own, tensors, strict=True):
            own.copy_(tensor)
        value = self._run(self._given)
        if self._update is not None:
            self._update_as_then()
        return value

    def _update_as_then(self) -> None:
        groups = self._update.__self__._optimizer.param_groups
        now = [_plain(group) for group in groups]
        for group, numbers in zip(groups, self._numbers, strict=True):
            group.update(numbers)
        self._update()
        for group, numbers in zip(groups, now, strict=True):
            group.update(numbers)

    def let_go(self) -> None:
        self.is_gone = True


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> type[FakeStep]:
    """A class of captured steps that work without a GPU; `made` are all that there were."""
    kept = type("Kept", (FakeStep,), {"made": []})
    monkeypatch.setattr(replays, "CapturedStep", kept)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return kept
