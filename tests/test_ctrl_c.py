"""Ctrl-C in `tune`: the first one gives a module, the second one is raised; `optimize` agrees."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plantune
from plantune.plans.guess import hand_plan
from plantune.plans.plan import Plan
from plantune.report.progress import STAGES
from plantune.search.results import Progress, Result, StepsSum
from plantune.space.search_space import load_search_space
from plantune.tuning import sought_for

from .fake_search import GivenSearch

ROOT = Path(__file__).resolve().parents[1]
RACE: Any = object()
X = torch.randn(2, 3, 8, 8)


def ctrl_c() -> None:
    """A real signal, whose handler runs before the next line does."""
    signal.raise_signal(signal.SIGINT)


class Net(nn.Module):
    """Calls `traced` whenever it is called, as when it is traced."""

    traced: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        type(self).traced()
        return torch.relu(self.conv(x)).mean((2, 3))


def by_hand(module: nn.Module) -> Plan:
    """The plan that each search here finds."""
    sought, _ = sought_for(plantune.optimize(module, X))
    space = load_search_space("cpu")
    return hand_plan(sought.graph, space, network="Net", without=("winograd",))


class FakeSearch(GivenSearch):
    """Finds the plan by hand; `during` happens in the search, `saving` while it is saved."""

    during: Callable[[], None]
    saving: Callable[[], None]
    raced: bool

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.plan = self.sought.by_hand(("winograd",))

    def run(self, worker: Any) -> Result:
        type(self).during()
        self.report(Progress("measuring", "", 1, 2, 9, StepsSum(), StepsSum(), 50.0))
        self.database.put_plan(self.plan, self.here)
        return Result(self.plan, True, RACE)

    def partial(self) -> Result:
        type(self).saving()
        self.database.put_plan(self.plan, self.here, partial=not self.raced)
        return Result(self.plan, False, RACE if self.raced else None)


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[FakeSearch]:
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("plantune.search.session.Search", FakeSearch)
    monkeypatch.setattr(FakeSearch, "during", staticmethod(ctrl_c), raising=False)
    monkeypatch.setattr(FakeSearch, "saving", staticmethod(lambda: None), raising=False)
    monkeypatch.setattr(FakeSearch, "raced", False, raising=False)
    return FakeSearch


def runs(model: plantune.TunedModule) -> tuple[str, list[Any]]:
    """What runs, as a plan says it."""
    model(X)
    return model.plan.route, [choice.candidate for choice in model.plan.choices]


@pytest.fixture
def module() -> Net:
    return Net().eval()


def test_before_a_race_it_runs_as_without_a_plan(module: Net) -> None:
    without = runs(plantune.optimize(module, X))
    assert runs(plantune.tune(module, X)) == without
    assert runs(plantune.optimize(module, X)) == without


def test_after_a_race_the_raced_plan_runs(module: Net, fake: type[FakeSearch]) -> None:
    fake.raced = True
    tuned = runs(plantune.tune(module, X))
    assert tuned == runs(plantune.optimize(module, X))
    assert tuned[1] == [choice.candidate for choice in by_hand(module).choices]


def test_what_an_earlier_search_found_stays(
    module: Net, fake: type[FakeSearch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "during", staticmethod(lambda: None))
    earlier = runs(plantune.tune(module, X))

    def partial(self: FakeSearch) -> Result:
        return Result(replace(self.plan, route="eager"), False, None)

    monkeypatch.setattr(fake, "during", staticmethod(ctrl_c))
    monkeypatch.setattr(fake, "partial", partial)
    assert runs(plantune.tune(module, X)) == earlier == runs(plantune.optimize(module, X))


def test_before_anything_was_measured_there_is_a_module_too(
    module: Net, fake: type[FakeSearch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "partial", lambda self: None)
    tuned = plantune.tune(module, X)
    torch.testing.assert_close(tuned(X), module(X))
    assert runs(tuned) == runs(plantune.optimize(module, X))


@pytest.mark.parametrize("place", ["acquire_lease", "find_plan"])
def test_so_there_is_before_the_search_begins(
    module: Net, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it waits for another search, and while plans are looked for."""
    monkeypatch.setattr(f"plantune.search.keeping.KeepingDatabase.{place}", lambda *a: ctrl_c())
    assert runs(plantune.tune(module, X)) == runs(plantune.optimize(module, X))


def test_while_the_module_is_traced_nothing_is_searched(
    module: Net, fake: type[FakeSearch], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: Any, **named: Any) -> None:
        raise AssertionError("a search began")

    monkeypatch.setattr(fake, "__init__", never)
    monkeypatch.setattr(Net, "traced", staticmethod(once(ctrl_c)))
    tuned = plantune.tune(module, X)
    torch.testing.assert_close(tuned(X), module(X))


def test_a_search_that_has_ended_is_used(
    module: Net, fake: type[FakeSearch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module is traced again afterwards."""

    def end() -> None:
        monkeypatch.setattr(Net, "traced", staticmethod(once(ctrl_c)))

    monkeypatch.setattr(fake, "during", staticmethod(end))
    assert runs(plantune.tune(module, X))[0] == "program"


def once(call: Callable[[], None]) -> Callable[[], None]:
    left = [call]
    return lambda: left.pop()() if left else None


class TestTheSecondOne:
    def test_while_the_first_is_dealt_with(
        self, module: Net, fake: type[FakeSearch], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is saved is saved."""
        monkeypatch.setattr(fake, "saving", staticmethod(ctrl_c))
        fake.raced = True
        with pytest.raises(KeyboardInterrupt):
            plantune.tune(module, X)
        assert runs(plantune.optimize(module, X))[0] == "program"

    def test_while_the_module_is_traced(self, module: Net, monkeypatch: pytest.MonkeyPatch) -> None:
        def twice() -> None:
            ctrl_c()
            ctrl_c()

        monkeypatch.setattr(Net, "traced", staticmethod(twice))
        with pytest.raises(KeyboardInterrupt):
            plantune.tune(module, X)

    def test_while_it_is_traced_again(
        self, module: Net, fake: type[FakeSearch], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def saved() -> None:
            monkeypatch.setattr(Net, "traced", staticmethod(ctrl_c))

        monkeypatch.setattr(fake, "saving", staticmethod(saved))
        with pytest.raises(KeyboardInterrupt):
            plantune.tune(module, X)


class Finalized:
    def __del__(self) -> None:
        ctrl_c()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_one_that_a_finalizer_swallows_counts(
    module: Net, fake: type[FakeSearch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda swallowed: None)
    monkeypatch.setattr(fake, "during", staticmethod(lambda: Finalized() and None))
    without = runs(plantune.optimize(module, X))
    assert runs(plantune.tune(module, X)) == without


def test_the_callers_handler_is_back_afterwards(
    module: Net, fake: type[FakeSearch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "during", staticmethod(lambda: None))
    before = signal.getsignal(signal.SIGINT)
    plantune.tune(module, X)
    assert signal.getsignal(signal.SIGINT) is before


def test_who_ignores_it_is_not_interrupted(module: Net) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert runs(plantune.tune(module, X))[0] == "program"
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_gets_no_signals(
    module: Net, fake: type[FakeSearch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "during", staticmethod(lambda: None))
    found: list[plantune.TunedModule] = []
    thread = threading.Thread(target=lambda: found.append(plantune.tune(module, X)))
    thread.start()
    thread.join()
    assert runs(found[0])[0] == "program"


SCRIPT = """
import json, torch, plantune
from torch import nn

torch.manual_seed(0)
module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()).eval()
x = torch.randn(2, 3, 16, 16)
tuned = plantune.tune(module, x, budget=30, progress=True)
later = plantune.optimize(module, x)
torch.testing.assert_close(tuned(x), module(x))
later(x)
plans = [(m.plan.route, [c.to_json() for c in m.plan.choices]) for m in (tuned, later)]
print(json.dumps(plans))
"""


@pytest.mark.parametrize(
    "stage",
    ["measuring", *(pytest.param(p, marks=pytest.mark.slow) for p in ("ranking", "racing"))],
)
def test_a_real_search_in_each_phase(stage: str) -> None:
    """Whatever it has found by then, both agree."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert any(line.startswith(STAGES[stage]) for line in iter(process.stderr.readline, ""))
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    tuned, later = json.loads(output)
    assert tuned == later
    if stage != "racing":
        assert tuned[0] == "eager"
