"""A network of the user's own through the commands, by its factory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plantune import optimize
from plantune.graph.tracing.tape import Tape
from plantune.plans.guess import framework_plan
from plantune.plans.workload import Workload
from plantune.space.search_space import load_search_space
from plantune.tuning import sought_for

from .conftest import EVIDENCE, FakeWorker, Run, changed, object_of

CODE = """
from torch import nn

def make(width=2):
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU())

def partly_frozen():
    network = nn.Sequential(make(), nn.Conv2d(2, 2, 1))
    network[0].requires_grad_(False)
    return network

def frozen():
    return make().requires_grad_(False)
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    (tmp_path / "own_file.py").write_text(CODE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return ("--model", f"{tmp_path}/own_file.py:make", "--input", "2x3x8x8")


@pytest.fixture
def stored(own: tuple[str, ...], store: Callable[..., int]) -> int:
    workload = Workload(own[1], 2, inputs=("2x3x8x8",))
    plan = framework_plan(workload.graph, load_search_space("cpu"), network="Sequential")
    return store(changed(plan, origin="measured", evidence=EVIDENCE))


@pytest.mark.parametrize("command", ["bench", "verify", "explain", "profile"])
def test_a_command_finds_its_plan_by_key_and_by_id(
    run: Run,
    own: tuple[str, ...],
    stored: int,
    worker: FakeWorker,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Tape | None] = []
    race = worker.race

    def noting(raced: Any, *arguments: Any, **named: Any) -> Any:
        seen.append(raced.tape)
        return race(raced, *arguments, **named)

    monkeypatch.setattr(worker, "race", noting)
    for id in ((), (stored,)) if command != "bench" else ((),):
        result = run(command, *id, *own, "--json")
        assert result.exit_code == 0, result.stderr
        assert object_of(result)
    assert all(tape is not None and len(tape.inputs) == 1 for tape in seen)
    assert len(seen) == {"bench": 1, "verify": 2}.get(command, 0)


def test_what_is_frozen_has_no_gradient_in_training(tmp_path: Path) -> None:
    """As in the module that `optimize` makes: such a search ended with a plan for other layers."""
    workload = Workload(
        f"{tmp_path}/own_file.py:partly_frozen", 2, mode="train", inputs=("2x3x8x8",)
    )
    trained = {"1.weight", "1.bias"}
    assert {name for name, _ in workload.graph.gradients} == trained
    tuned = optimize(workload.module(), torch.randn(2, 3, 8, 8), mode="train")
    assert sought_for(tuned)[0].problem == workload.problem
    assert workload.tape is not None
    assert set(workload.tape.trained) == trained


def test_a_frozen_network_has_nothing_to_train(run: Run, own: tuple[str, ...]) -> None:
    model = ("--model", own[1].replace("make", "frozen"), *own[2:])
    result = run("search", *model, "--mode", "train")
    assert result.exit_code == 2
    assert "requires a gradient: take --mode infer" in result.stderr


def test_with_other_settings_it_is_another_network(
    run: Run, own: tuple[str, ...], stored: int
) -> None:
    assert run("explain", *own, "--set", "width=4").exit_code == 3
    assert run("explain", stored, *own, "--set", "width=4").exit_code == 4


def test_a_plan_of_an_own_network_asks_for_its_factory(run: Run, stored: int) -> None:
    result = run("verify", stored)
    assert result.exit_code == 4
    assert "the plan is for Sequential" in result.stderr
    assert "--model package.module:factory" in result.stderr


def test_what_is_not_there_is_wrong_usage(run: Run, own: tuple[str, ...]) -> None:
    result = run("search", "--model", own[1] + "s", "--input", "2x3x8x8")
    assert (result.exit_code, "did you mean make?" in result.stderr) == (2, True)


INPUTS = ["8x3x", "x", "8x0x4", "3,4", "8x3:float8", "-1", "8X3", "", "+8x3", "8_0x3", "0x8"]
# Beyond what torch counts, or any memory holds; the digits of other scripts.
INPUTS += ["9" * 20 + "x8", "9" * 18 + "x" + "9" * 18, "9" * 5000, "x".join(["1024"] * 5)]
INPUTS += ["\uff18x3", "8x\uff13", "\u0668x3", "8x3:\uff49nt8"]


@pytest.mark.parametrize("text", INPUTS, ids=range(len(INPUTS)))
def test_an_input_that_is_none_is_refused(run: Run, own: tuple[str, ...], text: str) -> None:
    result = run("explain", *own[:2], "--input", text)
    assert (result.exit_code, "'--input'" in result.stderr) == (2, True)
    assert result.stderr.count("\n") == 1
    assert len(result.stderr) < 400


@pytest.mark.parametrize("text", ["width", "=2", "two words=2"])
def test_a_setting_that_is_none_is_refused(run: Run, own: tuple[str, ...], text: str) -> None:
    result = run("explain", *own, "--set", text)
    assert (result.exit_code, "keyword argument" in result.stderr) == (2, True)


def test_a_file_without_its_factory_is_told_how_to_name_it(run: Run) -> None:
    result = run("search", "--model", "nets.py")
    assert (result.exit_code, "or file.py:factory" in result.stderr) == (2, True)


def test_what_a_network_prints_is_no_result(run: Run, tmp_path: Path) -> None:
    code = """
print("imported")
from torch import nn

class Talking(nn.Linear):
    def forward(self, x):
        print("called")
        return super().forward(x)

def make():
    print("made")
    return Talking(3, 2)
"""
    (tmp_path / "own_file.py").write_text(code)
    asked = ("--model", f"{tmp_path}/own_file.py:make", "--input", "2x3")
    result = run("search", *asked, "--dry-run", "--json")
    assert object_of(result)["workload"]["batch"] == 2
    assert all(said in result.stderr for said in ("imported", "made", "called"))
