"""Modules for which no plan can be proved, raced or even made: eager runs them, with one warning.

Each is searched for as it is by `tune` and by the command, with a real worker.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import plantune
from plantune.cli import main
from plantune.errors import NoPlanLeft
from plantune.runtime.calls import choose
from plantune.search import policy

pytestmark = [
    pytest.mark.usefixtures("copied_processes", "without_compiler"),
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors"),
    # torch's, of the variance of one row.
    pytest.mark.filterwarnings("ignore:var.*degrees of freedom"),
]
# Enough for the search to end by itself.
BUDGET_S = 60.0


class After(nn.Module):
    """What becomes of a linear layer of 8 features."""

    def __init__(self, of: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.of = nn.Linear(8, 8), of

    def forward(self, x: Tensor) -> Tensor:
        return self.of(self.layer, x)


def overflows() -> nn.Module:
    return After(lambda layer, x: (layer(x) * 1e30) ** 3)


def divides_by_zero() -> nn.Module:
    return After(lambda layer, x: layer(x) / (layer(x) - layer(x)))


def variance_of_one_row() -> nn.Module:
    return After(lambda layer, x: layer(x).var(0))


def factor() -> nn.Module:
    """A random matrix is not positive definite."""
    return After(lambda layer, x: layer(torch.linalg.cholesky(x)))


def factor_of_a_sum() -> nn.Module:
    """Nor is what a program makes of one."""
    return After(lambda layer, x: torch.linalg.cholesky(x + 0 * layer(x)))


def identity() -> nn.Module:
    return nn.Identity()


def empty() -> nn.Module:
    return nn.Sequential()


def linear() -> nn.Module:
    return nn.Linear(8, 8)


def no_columns() -> nn.Module:
    return nn.Linear(8, 0)


def convolution() -> nn.Module:
    return nn.Conv2d(3, 4, 3)


CASES: list[tuple[Callable[[], nn.Module], str, str, str]] = [
    (overflows, "4x8", "infer", "the framework itself overflows"),
    (divides_by_zero, "4x8", "infer", "the framework itself overflows"),
    (divides_by_zero, "4x8", "train", "the framework itself overflows"),
    (variance_of_one_row, "1x8", "infer", "the framework itself overflows"),
    (factor, "8x8", "infer", "not positive-definite"),
    (factor_of_a_sum, "8x8", "infer", "not positive-definite"),
    (identity, "4x8", "infer", "no op"),
    (identity, "4x8", "train", "no op"),
    (empty, "4x8", "infer", "no op"),
    (linear, "0x8", "infer", "no elements"),
    (linear, "0x8", "train", "no elements"),
    (convolution, "0x3x8x8", "infer", "no elements"),
    (no_columns, "4x8", "infer", "no elements"),
]
IDS = [f"{make.__name__}-{shape}-{mode}" for make, shape, mode, _ in CASES]


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it compiles takes seconds, and is right or wrong as other kernels are."""
    monkeypatch.setattr("plantune.kernels.families.inductor.cxx_compiler", lambda: None)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setitem(choose.UNPLANNED, "cpu", "eager")
    monkeypatch.setattr(sys, "path", list(sys.path))
    # Which plan is the fastest makes no difference here.
    monkeypatch.setitem(policy.RANKED_TO, "cpu", 1.0)
    monkeypatch.setattr(policy, "IMPROVED_TO", 1.0)
    monkeypatch.setitem(policy.MAKES, "cpu", 1)


def image(shape: str) -> Tensor:
    """A positive definite one, where it is a matrix."""
    sizes = [*map(int, shape.split("x"))]
    return torch.eye(8) + 0.1 if sizes == [8, 8] else torch.randn(sizes)


def same(tuned: nn.Module, module: nn.Module, x: Tensor) -> None:
    """The results, and in training the gradients; NaN where eager has NaN."""
    for each in (tuned, module):
        each.zero_grad()
    ours, theirs = tuned(x), module(x)
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    if tuned.training and any(True for _ in module.parameters()):
        ours.sum().backward()
        theirs.sum().backward()
        for one, other in zip(tuned.parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, equal_nan=True)


@pytest.mark.parametrize(("make", "shape", "mode", "why"), CASES, ids=IDS)
def test_tune_gives_eager_and_one_warning(
    make: Callable[[], nn.Module], shape: str, mode: str, why: str
) -> None:
    module, x = make().train(mode == "train"), image(shape)
    if mode == "train" and not [*module.parameters()]:
        x.requires_grad_()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        tuned = plantune.tune(module, x, budget=BUDGET_S, mode=mode)
    (one,) = (each for each in said if "degrees of freedom" not in str(each.message))
    assert one.category is NoPlanLeft, str(one.message)
    assert why in str(one.message)
    same(tuned, module, x)
    same(plantune.optimize(module, x, mode=mode), module, x)
    assert tuned.plan.route == "eager"


# The command takes no input without elements, and trains nothing that has no parameters.
NAMED = [
    pytest.param(*case, id=name)
    for case, name in zip(CASES, IDS, strict=True)
    if "-0x" not in name and name != "identity-4x8-train"
]


@pytest.mark.parametrize(("make", "shape", "mode", "why"), NAMED)
def test_search_keeps_the_frameworks_plan(
    make: Callable[[], nn.Module], shape: str, mode: str, why: str
) -> None:
    named: tuple[Any, ...] = ("--model", f"{__file__}:{make.__name__}", "--input", shape)
    options = ("--mode", mode, "--budget", BUDGET_S, "--json")
    found = CliRunner().invoke(main, [*map(str, ("search", *named, *options))])
    assert found.exit_code == 0, found.stderr
    (warned,) = [line for line in found.stderr.splitlines() if "eager runs the network" in line]
    assert warned.startswith("warning: ")
    assert why in warned
    told = json.loads(found.stdout)
    assert (told["complete"], told["raced"], told["runner"]) == (True, False, "eager")
    module, x = make().train(mode == "train"), image(shape)
    same(plantune.optimize(module, x, mode=mode, fallback="error"), module, x)


class Block(nn.Module):
    """A ResNet's, with strides."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(64, 128, 3, 2, 1, bias=False)
        self.conv2 = nn.Conv2d(128, 128, 3, 1, 1, bias=False)
        self.down = nn.Conv2d(64, 128, 1, 2, bias=False)
        self.norm1, self.norm2, self.norm3 = (nn.BatchNorm2d(128) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + self.norm3(self.down(x)))


@pytest.mark.parametrize(
    ("dtype", "mode"),
    [(torch.bfloat16, "train"), (torch.float32, "train"), (torch.float32, "infer")],
)
def test_a_block_on_one_pixel_runs_whatever_its_proofs_say(dtype: torch.dtype, mode: str) -> None:
    """Norms of two numbers: eager's own gradient of a weight may be off by 1e15 of its size."""
    module, x = Block().to(dtype).train(), torch.randn(2, 64, 1, 1).to(dtype)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        tuned = plantune.tune(module, x, budget=20, mode=mode)
    if any(each.category is NoPlanLeft for each in said):
        assert tuned.plan.route == "eager"
    with torch.set_grad_enabled(mode == "train"):
        torch.testing.assert_close(tuned(x), module(x), atol=0.1, rtol=0.1)
