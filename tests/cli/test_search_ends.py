"""A search that cannot go on keeps what it has and says why: a lost GPU, a worker that is gone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from plantune.errors import (
    CannotJudge,
    MeasureTimeout,
    NoPlanLeft,
    NoViableCandidate,
    UnsupportedDevice,
    WorkerDied,
    WorkerFailed,
    WrongResult,
)
from plantune.plans.plan import Plan
from plantune.search.results import Result

from ..fake_search import GivenSearch
from .conftest import FakeWorker, Run, measured, object_of


@pytest.fixture
def ends_with(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, worker: FakeWorker
) -> Callable[..., None]:
    """Lets every search measure one candidate and end with an error."""

    def set_up(error: Exception, *, found: bool = True) -> None:
        class EndingSearch(GivenSearch):
            def run(self, worker: FakeWorker) -> Result:
                candidate = plan.choices[0].candidate
                self.database.put_trial("a" * 64, candidate, self.here, measured(10.0))
                raise error

            def partial(self) -> Result | None:
                if found:
                    self.database.put_plan(plan, self.here, partial=True)
                return Result(plan, False, None, 1, 0) if found else None

        monkeypatch.setattr("plantune.search.session.Search", EndingSearch)

    return set_up


def statuses(run: Run) -> list[str]:
    return [p["status"] for p in object_of(run("plans", "list", "--all", "--json"))["plans"]]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnsupportedDevice("the GPU for sm90 no longer responds"), 6),
        (WorkerDied("the measuring worker did not start: took too long"), 1),
        (WorkerFailed("the measuring worker failed:\nKeyError: 'x'"), 1),
        (MeasureTimeout("time took over 60 s; the worker was killed"), 1),
    ],
)
def test_what_was_found_is_kept(
    run: Run, ends_with: Callable[..., None], error: Exception, code: int
) -> None:
    ends_with(error)
    result = run("search", "--batch", 1, "--json")
    assert result.exit_code == code
    assert str(error).splitlines()[0] in object_of(result)["error"]["message"]
    assert "the best plan so far is kept as partial" in result.stderr
    assert statuses(run) == ["partial"]
    # Nobody holds the lease any more.
    assert run("search", "--batch", 1, "--no-wait").exit_code == code


def test_where_nothing_was_found_nothing_is_kept(run: Run, ends_with: Callable[..., None]) -> None:
    ends_with(UnsupportedDevice("the GPU is lost"), found=False)
    result = run("search", "--batch", 1)
    assert result.exit_code == 6
    assert "partial" not in result.stderr
    assert statuses(run) == []


@pytest.mark.parametrize(
    ("error", "code"), [(NoViableCandidate("nothing runs"), 1), (WrongResult("wrong", 1.0, 0.1), 5)]
)
def test_a_plan_that_is_wrong_or_does_not_run_is_not_kept(
    run: Run, ends_with: Callable[..., None], error: Exception, code: int
) -> None:
    ends_with(error)
    assert run("search", "--batch", 1).exit_code == code
    assert statuses(run) == []


@pytest.mark.parametrize("command", ["search", "bench", "verify", "profile"])
def test_what_has_no_room_is_refused_before_it_begins(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    store: Callable[..., int],
    plan: Plan,
    worker: FakeWorker,
    command: str,
) -> None:
    store(plan)
    monkeypatch.setattr("plantune.measure.room.free_bytes", lambda device: 1 << 20)
    result = run(command, "--batch", 1)
    assert result.exit_code == 6
    assert "needs about 0.1 GiB of memory, and 0.0 GiB are free here" in result.stderr
    assert "Traceback" not in result.stderr


TRACE = """Traceback (most recent call last):
  File "worker.py", line 9, in serve
RuntimeError: could not create a memory object"""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            WorkerFailed(f"the measuring worker failed:\n{TRACE}"),
            "the measuring worker failed: RuntimeError: could not create a memory object; all",
        ),
        (
            WorkerDied("the worker died during time: SIGSEGV; it printed:\nFatal\n  File x"),
            "the worker died during time: SIGSEGV; all",
        ),
    ],
)
def test_a_workers_trace_goes_to_a_file(
    run: Run, ends_with: Callable[..., None], error: Exception, told: str, cache: Path
) -> None:
    ends_with(error)
    result = run("search", "--batch", 1)
    assert result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert f"error: {told} that it said is in {cache}" in last
    assert "File" not in result.stderr
    assert Path(last.partition(" is in ")[2]).read_text() == str(error)


SEARCH = ("search", "--batch", 1, "--budget", 5, "--no-shipped")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (WrongResult("plantune gives another output", 1.0, 0.1), 5),
        (CannotJudge("the framework itself overflows"), 1),
        (WorkerDied("the worker died during time: SIGSEGV"), 1),
    ],
)
@pytest.mark.usefixtures("no_plan_left")
def test_where_no_plan_is_left_the_frameworks_is_kept(
    run: Run, worker: FakeWorker, error: Exception, code: int
) -> None:
    """A plan that is there is refused by `verify` as ever."""
    worker.failure = error
    result = run(*SEARCH, "--json")
    assert result.exit_code == 0, result.stderr
    told = object_of(result)
    assert (told["complete"], told["raced"], told["runner"]) == (True, False, "eager")
    (warned,) = [line for line in result.stderr.splitlines() if line.startswith("warning:")]
    assert warned.startswith("warning: eager runs the network: ")
    assert str(error) in warned
    assert statuses(run) == ["complete"]
    text = run(*SEARCH)
    assert "eager runs the network" in text.stdout
    assert "plan 2 in " in text.stdout
    assert run("verify", "--batch", 1, "--budget", 1).exit_code == code


def test_in_other_tests_such_a_warning_is_an_error(run: Run, worker: FakeWorker) -> None:
    worker.failure = CannotJudge("the framework itself overflows")
    result = run(*SEARCH)
    assert isinstance(result.exception, NoPlanLeft)


def test_an_interrupt_after_the_race_keeps_the_plan_that_was_raced(
    run: Run, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("plantune.search.contenders.finish.race_again", interrupted)
    result = run(*SEARCH)
    assert result.exit_code == 7
    assert "interrupted: this plan got through its race, and runs from now on" in result.stdout
    assert statuses(run) == ["complete"]
