"""plans merge, and plans of others in plans list and in the commands that need a plan."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from plantune.devices.machine import cpu_environment
from plantune.plans.database.exports import read_export
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.plan import Plan

from .conftest import FakeWorker, Run, object_of


@pytest.fixture
def share(tmp_path: Path) -> Callable[..., Path]:
    """A database that somebody works in."""

    def put(name: str, plan: Plan, **environment: object) -> Path:
        path = tmp_path / name
        with PlanDatabase.open(path) as database:
            database.put_plan(plan, replace(cpu_environment(), **environment))
        return path

    return put


def test_the_list_says_from_where_a_plan_is(
    run: Run, store: Callable[..., int], share: Callable[..., Path], plan: Plan, fused_plan: Plan
) -> None:
    store(plan)
    assert " from" not in run("plans", "list").stdout.splitlines()[0]
    path = share("team.db", fused_plan)
    listed = object_of(run("plans", "list", "--from", path, "--json"))["plans"]
    assert [(item["id"], item["from"]) for item in listed] == [(1, "own"), (None, str(path))]
    assert str(path) in run("plans", "list", "--from", path).stdout
    assert "PLANTUNE_PLANS" not in os.environ


def test_a_teams_plan_serves_where_there_is_none_of_ones_own(
    run: Run, share: Callable[..., Path], fused_plan: Plan
) -> None:
    wanted = ("explain", "--batch", 1, "--arch", "cpu")
    assert run(*wanted).exit_code == 3
    result = run(*wanted, "--from", share("team.db", fused_plan))
    assert result.exit_code == 0, result.stderr
    assert "the team plan" in result.stdout + result.stderr


def test_a_file_that_is_not_there_is_wrong_usage(run: Run, tmp_path: Path) -> None:
    assert run("plans", "list", "--from", tmp_path / "none.db").exit_code == 2
    assert run("plans", "merge", tmp_path / "out.db", tmp_path / "none.db").exit_code == 2


def test_conflicts_are_listed_and_the_first_file_decides(
    run: Run, share: Callable[..., Path], plan: Plan, fused_plan: Plan, tmp_path: Path
) -> None:
    files, out = [share("a.db", plan), share("b.db", fused_plan)], tmp_path / "out.db"
    result = run("plans", "merge", out, *files, "--json")
    (conflict,) = object_of(result)["conflicts"]
    assert conflict["kept"] == str(files[0])
    assert conflict["files"] == [*map(str, files)]
    assert not conflict["raced"]
    assert [item.plan for item in read_export(out)] == [plan]
    assert "conflict" in run("plans", "merge", out, *files).stdout


def test_conflicts_race_on_a_machine_like_theirs(
    run: Run,
    share: Callable[..., Path],
    plan: Plan,
    fused_plan: Plan,
    tmp_path: Path,
    worker: FakeWorker,
) -> None:
    """The later a plan is in a race, the faster this worker finds it."""
    files, out = [share("a.db", plan), share("b.db", fused_plan)], tmp_path / "out.db"
    (conflict,) = object_of(run("plans", "merge", out, *files, "--race", "--json"))["conflicts"]
    assert (conflict["kept"], conflict["raced"]) == (str(files[1]), True)
    assert [item.plan for item in read_export(out)] == [fused_plan]


def test_plans_of_other_machines_do_not_race(
    run: Run, share: Callable[..., Path], plan: Plan, fused_plan: Plan, tmp_path: Path
) -> None:
    files = [share("a.db", plan, threads=99), share("b.db", fused_plan, threads=99)]
    result = run("plans", "merge", tmp_path / "out.db", *files, "--race", "--json")
    assert not object_of(result)["conflicts"][0]["raced"]
    assert "not raced" in result.stderr


def test_a_file_that_is_no_export_is_not_overwritten(
    run: Run, share: Callable[..., Path], plan: Plan
) -> None:
    path = share("a.db", plan)
    assert run("plans", "merge", path, path).exit_code == 4
