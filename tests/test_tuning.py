"""`plantune.tune`: what it searches for, what it gives back, and what it shows meanwhile."""

from __future__ import annotations

import io
import sqlite3
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import plantune
from plantune.errors import (
    Busy,
    DatabaseFull,
    DatabaseWarning,
    MeasureTimeout,
    NoPlanLeft,
    NotEnoughMemory,
    UnsupportedDevice,
    UnsupportedModule,
    WorkerDied,
    WorkerFailed,
)
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.rows import SCHEMA_VERSION
from plantune.plans.plan import Plan
from plantune.runtime.calls import choose
from plantune.search.results import Progress, Result, StepsSum
from plantune.search.search import Search
from plantune.search.session import key_of
from plantune.tuning import sought_for

from .fake_search import GivenSearch

RACE: Any = object()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 2)

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        y = torch.relu(self.conv(x)).mean((2, 3))
        return {"y": self.head(y) * scale, "sorted": y.cumsum(1)}


class FakeSearch(GivenSearch):
    """Finds the plan by hand at once; `during` is what else happens then."""

    made: ClassVar[list[FakeSearch]] = []
    during: Any = staticmethod(lambda: None)

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        FakeSearch.made.append(self)
        self.plan = self.sought.by_hand(("winograd",))

    def run(self, worker: Any) -> Result:
        self.report(
            Progress("measuring", "conv", 1, 2, 9, StepsSum(3000.0, 5), StepsSum(4000.0, 9), 50.0)
        )
        FakeSearch.during()
        self.database.put_plan(self.plan, self.here)
        return Result(self.plan, True, RACE, 1, 2)

    def partial(self) -> Result:
        self.database.put_plan(self.plan, self.here, partial=True)
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
    assert (search.options.budget_s, len(search.sought.tape.inputs)) == (7, 2)
    later = plantune.optimize(nn.ModuleDict({"inner": module})["inner"], *INPUTS, **NAMED)
    for each in (model, later):
        torch.testing.assert_close(each(*INPUTS, **NAMED), module(*INPUTS, **NAMED))
        assert same(each.plan, search.plan)


def test_in_training_the_graph_has_gradients_of_what_trains(fake: type[FakeSearch]) -> None:
    module = Net()
    module.head.requires_grad_(False)
    tuned(module, mode="train")
    (search,) = fake.made
    assert {name for name, _ in search.sought.graph.gradients} == {"conv.weight", "conv.bias"}
    assert search.sought.tape.trained == ("conv.weight", "conv.bias")


def test_a_budget_that_is_too_short_for_a_race_is_said(
    fake: type[FakeSearch], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hasty(self: FakeSearch, worker: Any) -> Result:
        plan = replace(self.plan, route="eager")
        self.database.put_plan(plan, self.here)
        return Result(plan, True, None, 0, 2, budget_s=3.0)

    monkeypatch.setattr(fake, "run", hasty)
    with pytest.warns(UserWarning, match="3 s were too short to race a plan; the network runs"):
        assert tuned(budget=3).plan.route == "eager"


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
        found = replace(self.plan, route="eager")
        self.database.put_plan(found, self.here)
        return Result(found, True, RACE, 1, 2)

    earlier = tuned().plan
    monkeypatch.setattr(PlanDatabase, "put_plan", full)
    monkeypatch.setattr(fake, "run", faster)
    with pytest.warns(match="the disk is full"):
        model = tuned()
    assert (earlier.route, model.plan.route) == ("program", "eager")


class TestWhereOptimizeWorksSoDoesTune:
    def test_where_no_plan_is_left_eager_runs(
        self, fake: type[FakeSearch], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def nothing(self: FakeSearch, worker: Any) -> Result:
            plan = replace(self.plan, route="eager")
            self.database.put_plan(plan, self.here)
            return Result(plan, True, None, nothing_left="the framework overflows")

        monkeypatch.setattr(fake, "run", nothing)
        with pytest.warns(NoPlanLeft) as said:
            model = tuned()
        (one,) = said
        assert str(one.message) == "Net: eager runs the network: the framework overflows"
        assert one.filename == __file__
        assert model.plan.route == "eager"

    @pytest.mark.parametrize(
        "error",
        [
            MeasureTimeout("time took over 60 s; the worker was killed"),
            NotEnoughMemory("Net at batch 2 needs about 9 GiB", 9, 1),
            WorkerDied("the measuring worker did not start: took too long"),
            Busy("another search goes on", 1, "here", "a"),
        ],
    )
    def test_where_no_search_can_be_the_module_runs_as_optimize_has_it(
        self, fake: type[FakeSearch], error: Exception, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail() -> None:
            raise error

        monkeypatch.setattr(fake, "during", staticmethod(fail))
        module = Net().eval()
        with pytest.warns(NoPlanLeft, match=f"no search for Net: {error}; it runs as") as said:
            model = tuned(module)
        assert {each.filename for each in said if each.category is NoPlanLeft} == {__file__}
        torch.testing.assert_close(model(*INPUTS, **NAMED), module(*INPUTS, **NAMED))

    @pytest.mark.parametrize("error", [WorkerFailed("KeyError: 'x'"), UnsupportedDevice("lost")])
    def test_what_is_a_fault_or_a_lost_gpu_is_raised(
        self, fake: type[FakeSearch], error: Exception, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail() -> None:
            raise error

        monkeypatch.setattr(fake, "during", staticmethod(fail))
        with pytest.raises(type(error)):
            tuned()

    @pytest.mark.parametrize("of", ["a later plantune", "another program"])
    def test_a_database_of_others_is_left_as_it_is(self, of: str) -> None:
        with PlanDatabase.open() as database:
            path = database.path
        assert path is not None
        written = f"UPDATE meta SET value = '{SCHEMA_VERSION + 1}'"
        if of == "another program":
            path.unlink()
            written = "CREATE TABLE notes (text)"
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(written)
            connection.commit()
        before = path.read_bytes()
        with pytest.warns(DatabaseWarning) as said:
            model = tuned()
        assert any("the plan is not stored" in str(each.message) for each in said)
        assert model.plan.route == "program"
        assert path.read_bytes() == before


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
    assert model.plan.origin == "measured" or model.plan.route == "eager"
    torch.testing.assert_close(model(*INPUTS, **NAMED), module(*INPUTS, **NAMED))
