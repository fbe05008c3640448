"""Plan files of others: found after one's own and before shipped ones, and left untouched."""

from __future__ import annotations

import os
import sqlite3
import stat
import sys
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from plantune.base.canonical import Attrs
from plantune.devices.machine import Environment
from plantune.errors import DatabaseWarning, InvalidPlan
from plantune.kernels.family import Candidate
from plantune.plans.database import stored
from plantune.plans.database.exports import export_plans
from plantune.plans.database.merging import merged
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.stored import find_stored_plan
from plantune.plans.database.team import plans_of
from plantune.plans.plan import Choice, Plan
from plantune.plans.problem import Problem

HERE = Environment("cpu", "A CPU", "0" * 16, 2, "2.13.0", "0.1.0", "g++", "Linux x86_64")
THERE = replace(HERE, device="Another CPU")


def choosing(layout: str) -> Plan:
    candidate = Candidate("framework", Attrs(layout=layout))
    problem = Problem("net", "a" * 64, "cpu", 8, "float32", "infer")
    return Plan(problem, (Choice(("conv",), candidate),), "measured")


PLAN, OTHER = choosing("nhwc"), choosing("nchw")
PROBLEM = PLAN.problem


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's cache, the shipped plans and the team's, all empty."""
    for name in ("plans", "team"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PLANTUNE_PLANS", str(tmp_path / "team"))
    monkeypatch.setattr(stored, "data_folder", lambda name: tmp_path / name)
    monkeypatch.setattr(stored, "CONTENDERS_ONLY", ())


def share(path: Path, plan=PLAN, environment=HERE) -> Path:
    with PlanDatabase.in_memory() as database:
        database.put_plan(plan, environment)
        export_plans(database, path, plan.problem.arch)
    return path


def own(plan=PLAN, environment=HERE) -> None:
    with PlanDatabase.open() as database:
        database.put_plan(plan, environment)


def test_own_comes_before_team_and_team_before_shipped(tmp_path: Path) -> None:
    share(tmp_path / "plans" / f"{PLAN.problem.arch}.db", OTHER, THERE)
    assert find_stored_plan(PROBLEM, HERE).whose == "shipped"
    share(tmp_path / "team" / "a.db", PLAN, THERE)
    found = find_stored_plan(PROBLEM, HERE)
    assert (found.whose, found.plan) == ("team", PLAN)
    own(OTHER, THERE)
    found = find_stored_plan(PROBLEM, HERE)
    assert (found.whose, found.plan) == ("own", OTHER)


def test_an_exact_match_of_the_team_comes_before_a_compatible_own_one(tmp_path: Path) -> None:
    own(OTHER, THERE)
    share(tmp_path / "team" / "a.db")
    found = find_stored_plan(PROBLEM, HERE)
    assert (found.whose, found.plan, found.match) == ("team", PLAN, "exact")


def test_the_first_file_that_is_named_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [share(tmp_path / "b.db", OTHER), share(tmp_path / "a.db", PLAN)]
    monkeypatch.setenv("PLANTUNE_PLANS", os.pathsep.join(map(str, files)))
    assert find_stored_plan(PROBLEM, HERE).plan == OTHER


def everything_in(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.iterdir()}


def test_nothing_is_written_beside_a_database_that_is_worked_in(tmp_path: Path) -> None:
    """Its newest rows are in a log beside it."""
    path = tmp_path / "team" / "worked_in.db"
    with PlanDatabase.open(path) as database:
        database.put_plan(PLAN, HERE)
        assert Path(f"{path}-wal").stat().st_size
        before = everything_in(path.parent)
        assert find_stored_plan(PROBLEM, HERE).plan == PLAN
        assert everything_in(path.parent) == before
    before = everything_in(path.parent)  # without the log: closing it wrote the file
    assert [*before] == ["worked_in.db"]
    assert find_stored_plan(PROBLEM, HERE).plan == PLAN
    assert everything_in(path.parent) == before


def test_a_file_that_may_only_be_read_serves(tmp_path: Path) -> None:
    path = share(tmp_path / "team" / "a.db")
    path.chmod(stat.S_IRUSR)
    path.parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert find_stored_plan(PROBLEM, HERE).plan == PLAN
    finally:
        path.parent.chmod(stat.S_IRWXU)


@pytest.fixture(scope="module")
def opened() -> Iterator[list[tuple[str, object]]]:
    """Files that Python opens, with how, and databases that SQLite does."""
    seen: list[tuple[str, object]] = []

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("open", "sqlite3.connect") and watching:
            seen.append((str(arguments[0]), arguments[2] if event == "open" else "by SQLite"))

    watching = [True]
    sys.addaudithook(hook)
    yield seen
    watching.clear()


@pytest.mark.parametrize("worked_in", [False, True])
def test_a_file_of_a_network_is_only_read_and_sqlite_never_has_it(
    tmp_path: Path, opened: list[tuple[str, object]], worked_in: bool
) -> None:
    """Where it may only be read, a lock, a log or memory that is mapped would fail."""
    path = tmp_path / "team" / "a.db"
    with PlanDatabase.open(path) if worked_in else nullcontext() as database:
        if database is None:
            share(path)
        else:
            database.put_plan(PLAN, HERE)
        opened.clear()
        assert find_stored_plan(PROBLEM, HERE).plan == PLAN
        assert [item.plan for item in merged([path]).decided({})] == [PLAN]
        there = [how for name, how in opened if str(path.parent) in name]
        of_sqlite = [name for name, how in opened if how == "by SQLite"]
    assert len(there) == (4 if worked_in else 2)
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT
    assert not any(isinstance(how, str) or how & writing for how in there)
    assert of_sqlite


@pytest.mark.parametrize("content", [b"", b"not a database", b"SQLite format 3\0" + bytes(600)])
def test_what_is_no_plan_file_is_warned_of_and_the_others_serve(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "team" / "0.db").write_bytes(content)
    share(tmp_path / "team" / "1.db")
    with pytest.warns(DatabaseWarning, match=r"0\.db: its plans cannot be read"):
        assert find_stored_plan(PROBLEM, HERE).plan == PLAN


def test_a_file_with_a_view_is_refused(tmp_path: Path) -> None:
    path = share(tmp_path / "a.db")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE VIEW odd AS SELECT 1")
    with pytest.raises(InvalidPlan, match="another program"):
        plans_of(path)


class TestMerged:
    def test_the_same_plan_is_no_conflict_and_its_newest_evidence_stays(
        self, tmp_path: Path
    ) -> None:
        newer = replace(PLAN, evidence=Attrs(median_ms=0.5))
        files = [share(tmp_path / "a.db", PLAN), share(tmp_path / "b.db", newer)]
        found = merged(files)
        assert not found.conflicts
        assert [item.plan for item in found.decided({})] == [newer]

    def test_different_plans_are_a_conflict_and_the_first_one_stays(self, tmp_path: Path) -> None:
        files = [share(tmp_path / "a.db", OTHER), share(tmp_path / "b.db", PLAN)]
        found = merged(files)
        (conflict,) = found.conflicts
        assert [item.path for item in conflict.plans] == files
        assert [item.plan for item in found.decided({})] == [OTHER]
        winner = conflict.plans[1].stored
        assert found.decided({conflict.key: winner}) == [winner]

    def test_other_environments_are_no_conflict(self, tmp_path: Path) -> None:
        files = [share(tmp_path / "a.db", OTHER, THERE), share(tmp_path / "b.db", PLAN, HERE)]
        found = merged(files)
        assert not found.conflicts
        assert {item.plan for item in found.decided({})} == {PLAN, OTHER}
