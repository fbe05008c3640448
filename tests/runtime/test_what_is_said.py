"""What is said of modules and calls that no plan serves: enough to know what to write instead."""

from __future__ import annotations

import warnings
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

import plantune
from plantune import UnplannedCall, optimize
from plantune.errors import InputMismatch, UnsupportedModule
from plantune.runtime.load import TrainingMode

X = torch.randn(2, 3)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, shift: float | None = None, *, scale: float = 1.0) -> Tensor:
        return self.layer(x) * scale + (0 if shift is None else shift)


class Named(Scaled):
    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return self.layer(x["x"])


class Apart(Scaled):
    """Holds a tensor that is no buffer, in a module within."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.mean = torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - self.layer.mean)


def test_constants_in_other_places_are_told_by_them() -> None:
    tuned = optimize(Scaled().eval(), X, scale=2.0)
    said = r"input \(\(2, 3\) float32, scale=2.0\), got \(\(2, 3\) float32, 2.0\)"
    with pytest.warns(UnplannedCall, match=said):
        tuned(X, 2.0)


def test_other_structures_are_told_by_their_types() -> None:
    tuned = optimize(Named().eval(), OrderedDict(x=X))
    with pytest.warns(UnplannedCall, match=r"OrderedDict\(.*\), got \(\{'x': \(2, 3\) float32\}\)"):
        tuned({"x": X})


def test_an_error_does_not_say_that_something_ran() -> None:
    tuned = optimize(nn.Linear(3, 3).eval(), X, fallback="error")
    with pytest.raises(InputMismatch, match=r"got \(1, 3\); fallback='error' keeps the framework"):
        tuned(X[:1])


@pytest.mark.parametrize("given", [torch.relu, nn.Linear])
def test_what_is_no_module_is_told(given: object) -> None:
    with pytest.raises(TypeError, match=r"takes an nn\.Module that is made, got"):
        optimize(given, X)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_that_torch_has_made_of_others() -> None:
    module = nn.Linear(3, 3).eval()
    with pytest.raises(UnsupportedModule, match=r"give module\._orig_mod"):
        optimize(torch.compile(module), X)  # type: ignore[arg-type]
    scripted = optimize(torch.jit.script(module), X)
    with pytest.warns(UnplannedCall, match="TorchScript keeps its parameters"):
        torch.testing.assert_close(scripted(X), module(X))


def test_a_tensor_that_is_no_buffer_is_named() -> None:
    with pytest.raises(UnsupportedModule, match=r"as a buffer\), self\.layer\.mean, cannot be"):
        optimize(Apart().eval(), X)


class Drops(Scaled):
    """Asks in a function inside of its forward, and holds what has any attribute."""

    ops = torch.ops

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return sum(nn.functional.dropout(self.layer(y), 0.5, self.training) for y in [x, x])


@pytest.mark.parametrize(
    ("module", "asks"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.Tanh()), False),
        (nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1)), True),
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), True),
        (Drops(), True),
    ],
)
def test_only_modules_that_ask_for_the_mode_are_warned_of(module: nn.Module, asks: bool) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        optimize(module, X)
    assert [each.category for each in said] == [TrainingMode] * asks


@pytest.mark.parametrize("name", ["plan", "pad_to"])
def test_a_search_is_given_no_plan(name: str) -> None:
    with pytest.raises(TypeError, match=f"tune takes no {name}"):
        plantune.tune(nn.Linear(3, 3).eval(), X, **{name: 4})
