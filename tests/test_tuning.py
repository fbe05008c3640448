"""`plantune.tune`: what it searches for, what it gives back, and what it shows meanwhile."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import plantune
from plantune.default_plans import hand_plan
from plantune.errors import DatabaseFull, UnsupportedModule
from plantune.plan import Plan
from plantune.plan_db.database import PlanDatabase
from plantune.runtime import choose
from plantune.search.results import Progress, Result, StepsSum
from plantune.search.search import Search
from plantune.search.session import key_of
from plantune.space.search_space import load_search_space
from plantune.tuning import sought_for

RACE: Any = object()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 2)

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        y = torch.relu(self.conv(x)).mean((2, 3))
        return {"y": self.head(y) * scale, "sorted": y.cumsum(1)}


class FakeSearch:
    """Finds the plan by hand at once; `during` is what else happens then."""

    made: ClassVar[list[FakeSearch]] = []
    during: Any = staticmethod(lambda: None)

    def __init__(
        self,
        graph: Any,
        problem: Any,
        settings: Any,
        database: Any,
        here: Any,
        report: Any,
        tape: Any,
    ) -> None:
        FakeSearch.made.append(self)
        self.graph, self.settings, self.tape = graph, settings, tape
        self._database, self._here, self._report = database, here, report
        space = load_search_space("cpu")
        self.plan = hand_plan(graph, space, network=problem.network, without=("winograd",))

    def run(self, worker: Any) -> Result:
        self._report(
            Progress("measuring", "conv", 1, 2, 9, StepsSum(3000.0, 5), StepsSum(4000.0, 9), 50.0)
        )
        FakeSearch.during()
        self._database.put_plan(self.plan, self._here)
        return Result(self.plan, True, RACE, 1, 2)

    def partial(self) -> Result:
        self._database.put_plan(self.plan, self._here, partial=True)
        return Result(self.plan, False, None, 1, 2)


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[FakeSearch]:
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("plantune.search.session.Search", FakeSearch)
    monkeypatch.setattr(FakeSearch, "made", [])
    monkeypatch.setattr(FakeSearch, "during", staticmethod(lambda: None))
    return FakeSearch


INPUTS = (torch.randn(2, 3, 8, 8),)
NAMED = {"scale": torch.rand(2, 1)}


def tuned(module: nn.Module | None = None, **how: Any) -> plantune.TunedModule:
    return plantune.tune(module or Net().eval(), *INPUTS, **NAMED, **how)


def same(one: Plan, other: Plan) -> bool:
    return [c.candidate for c in one.choices] == [c.candidate for c in other.choices]


def test_it_runs_from_the_plan_that_was_found_and_so_does_optimize_later(
    fake: type[FakeSearch],
) -> None:
    module = Net().eval()
    model = tuned(module, budget=7)
    (search,) = fake.made
    assert (search.settings.budget_s, len(search.tape.inputs)) == (7, 2)
    later = plantune.optimize(nn.ModuleDict({"inner": module})["inner"], *INPUTS, **NAMED)
    for each in (model, later):
        torch.testing.assert_close(each(*INPUTS, **NAMED), module(*INPUTS, **NAMED))
        assert same(each.plan, search.plan)


def test_in_training_the_graph_has_gradients_of_what_trains(fake: type[FakeSearch]) -> None:
    module = Net()
    module.head.requires_grad_(False)
    tuned(module, mode="train")
    (search,) = fake.made
    assert {name for name, _ in search.graph.gradients} == {"conv.weight", "conv.bias"}
    assert search.tape.trained == ("conv.weight", "conv.bias")


def test_an_interrupted_search_gives_the_best_so_far(
    fake: type[FakeSearch], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fake, "during", staticmethod(interrupt))
    assert same(tuned().plan, fake.made[0].plan)
    monkeypatch.setattr(fake, "partial", lambda self: None)
    with pytest.raises(KeyboardInterrupt):
        tuned()


def test_an_interrupted_search_leaves_what_an_earlier_one_found(
    fake: type[FakeSearch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own plan was not raced, and may be slower than eager."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    def partial(self: FakeSearch) -> Result:
        return Result(replace(self.plan, runner="eager"), False, None, 1, 2)

    raced = tuned().plan
    monkeypatch.setattr(fake, "during", staticmethod(interrupt))
    monkeypatch.setattr(fake, "partial", partial)
    assert tuned().plan.runner == raced.runner == "program"


def test_a_budget_that_is_too_short_for_a_race_is_said(
    fake: type[FakeSearch], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hasty(self: FakeSearch, worker: Any) -> Result:
        plan = replace(self.plan, runner="eager")
        self._database.put_plan(plan, self._here)
        return Result(plan, True, None, 0, 2, budget_s=3.0)

    monkeypatch.setattr(fake, "run", hasty)
    with pytest.warns(UserWarning, match="3 s were too short to race a plan; the network runs"):
        assert tuned(budget=3).plan.runner == "eager"


def test_without_a_database_the_plan_serves_this_module(
    fake: type[FakeSearch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an earlier search stored one."""
    put = PlanDatabase.put_plan

    def full(self: PlanDatabase, *arguments: Any, **named: Any) -> int:
        if self.path is not None:
            raise DatabaseFull("the disk is full")
        return put(self, *arguments, **named)

    def faster(self: FakeSearch, worker: Any) -> Result:
        found = replace(self.plan, runner="eager")
        self._database.put_plan(found, self._here)
        return Result(found, True, RACE, 1, 2)

    earlier = tuned().plan
    monkeypatch.setattr(PlanDatabase, "put_plan", full)
    monkeypatch.setattr(fake, "run", faster)
    with pytest.warns(match="the disk is full"):
        model = tuned()
    assert (earlier.runner, model.plan.runner) == ("program", "eager")


class Stream(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


class Notebook(Stream):
    __module__ = "ipykernel.iostream"


SHOWN = "trying kernels, 50 s left: best so far about 3 ms, eager about 4 ms"


@pytest.mark.parametrize(
    ("stream", "progress", "begins"),
    [
        (Stream(False), None, ""),
        (Stream(False), True, SHOWN),
        (Stream(True), None, "\r" + SHOWN),
        (Stream(True), False, ""),
        (Notebook(False), None, "\r" + SHOWN),
    ],
)
def test_progress_is_shown_where_somebody_sees_it(
    stream: Stream, progress: bool | None, begins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    tuned(progress=progress)
    text = stream.getvalue()
    assert text.startswith(begins)
    assert bool(text) == bool(begins)
    if begins:
        last = text.splitlines()[-1].rpartition("\r")[2]
        assert last.startswith("runs as plantune's plan: it was not raced")


class Written:
    """What a logger of one's own may be: it can only be written to."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


@pytest.mark.parametrize("progress", [None, True])
def test_stderr_need_not_be_a_file(progress: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (None, Written()):
        monkeypatch.setattr(sys, "stderr", stream)
        tuned(progress=progress)
    assert stream is not None
    assert stream.text.startswith(SHOWN if progress else "")


def test_what_cannot_be_searched_for_says_why() -> None:
    with pytest.raises(ValueError, match="budget must be a number of seconds above 0"):
        tuned(budget=0)
    module = Net().eval()
    module.head.register_forward_hook(lambda *a: None)
    with pytest.raises(UnsupportedModule, match="hook"):
        tuned(module)


def test_what_is_sought_is_named_by_its_layers_too() -> None:
    one, other = (
        sought_for(plantune.optimize(nn.Sequential(nn.Linear(2, n)).eval(), torch.ones(1, 2)))[0]
        for n in (2, 3)
    )
    assert str(one.problem) == str(other.problem)
    assert key_of(one.problem) != key_of(other.problem)


def test_without_a_plan_one_quiet_word_says_how_to_find_one(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(choose.log, "info", lambda text, *of: logged.append(text % of))
    model = plantune.optimize(Net().eval(), *INPUTS, **NAMED)
    for _ in range(2):
        model(*INPUTS, **NAMED)
    assert logged == [
        "Net: no plan is stored for it; plantune.tune(module, *inputs) searches for one, in about "
        "a minute"
    ]
    assert not [w for w in recwarn if "plantune" in str(w.message)]


@pytest.mark.slow
def test_a_class_that_no_other_process_has_is_searched_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For real, and raced if there was time."""
    monkeypatch.setattr("plantune.search.session.Search", Search)

    class Local(Net):
        pass

    module = Local().eval()
    model = tuned(module, budget=20)
    assert model.plan.origin == "measured" or model.plan.runner == "eager"
    torch.testing.assert_close(model(*INPUTS, **NAMED), module(*INPUTS, **NAMED))
