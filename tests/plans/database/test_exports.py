"""Exported files hold plans and nothing else, and give equal plans where they are imported."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from plantune.base.canonical import Attrs
from plantune.devices.machine import Environment
from plantune.errors import InvalidDatabase, NoPlan, PlantuneError, ReadOnlyDatabase
from plantune.plans.database.exports import export_plans, import_plans, read_export
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.plan import Plan

MakePlan = Callable[..., Plan]


def test_export_then_import_gives_equal_plans(
    exported: Path, database: PlanDatabase, target: PlanDatabase
) -> None:
    imported = import_plans(exported, target)
    plans = {stored.plan.problem: stored for stored in database.plans()}
    again = {stored.plan.problem: stored for stored in target.plans()}
    assert len(imported) == len(plans) == len(again) == 2
    for problem, stored in plans.items():
        assert again[problem].plan == stored.plan
        assert again[problem].environment == stored.environment
        assert again[problem].created_at == stored.created_at
    found = target.find_plan(imported[0].problem, database.plans()[0].environment)
    assert found is not None
    assert found.match == "exact"


def test_the_same_plans_give_the_same_bytes(
    exported: Path, target: PlanDatabase, tmp_path: Path
) -> None:
    import_plans(exported, target)
    export_plans(target, tmp_path / "again.db", "cpu")
    assert (tmp_path / "again.db").read_bytes() == exported.read_bytes()


def test_an_export_is_one_small_file_with_parameters_and_evidence_only(exported: Path) -> None:
    assert sorted(file.name for file in exported.parent.iterdir() if "cpu.db" in file.name) == [
        "cpu.db"
    ]
    assert exported.stat().st_size < 64 << 10
    with closing(sqlite3.connect(exported)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        names = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema")}
        types = {
            type(value)
            for table in ("meta", "environments", "plans")
            for row in connection.execute(f"SELECT * FROM {table}")
            for value in row
        }
    assert {name for name in names if "autoindex" not in name} == {"meta", "environments", "plans"}
    assert types <= {str, int, float, type(None)}


def test_the_newest_complete_plan_of_each_machine_is_exported(
    database: PlanDatabase, tmp_path: Path, here: Environment, make_plan: MakePlan
) -> None:
    old, new, partial = (make_plan(evidence=Attrs(median_ms=float(ms))) for ms in (3, 2, 1))
    there = replace(here, device="Another CPU")
    for plan, environment in ((old, here), (new, here), (old, there)):
        database.put_plan(plan, environment)
    database.put_plan(partial, here, partial=True)
    database.put_plan(make_plan(network="another"), here)
    export_plans(database, tmp_path / "cpu.db", "cpu", network="net")
    stored = {(item.plan, item.environment) for item in read_export(tmp_path / "cpu.db")}
    assert stored == {(new, here), (old, there)}


def test_nothing_to_export_is_said_and_no_file_made(
    database: PlanDatabase, tmp_path: Path, here: Environment, plan: Plan
) -> None:
    database.put_plan(plan, here)
    with pytest.raises(NoPlan, match="no complete plan for sm90 is stored"):
        export_plans(database, tmp_path / "sm90.db", "sm90")
    assert not (tmp_path / "sm90.db").exists()


@pytest.mark.parametrize("kind", ["text", "folder", "link", "itself"])
def test_an_export_replaces_exports_and_no_other_file(
    exported: Path, database: PlanDatabase, tmp_path: Path, kind: str
) -> None:
    assert database.path is not None
    text, link, folder = tmp_path / "README.md", tmp_path / "link.db", tmp_path / "folder"
    text.write_text("my notes")
    link.symlink_to(text)
    folder.mkdir()
    path = {"text": text, "link": link, "folder": folder, "itself": database.path}[kind]
    with pytest.raises(PlantuneError, match="give another path"):
        export_plans(database, path, "cpu")
    assert text.read_text() == "my notes"
    assert len(database.plans()) == 2
    export_plans(database, exported, "cpu")


@pytest.mark.parametrize("read_only", [False, True])
def test_an_export_is_not_a_database_to_work_in_and_stays_as_it_is(
    exported: Path, read_only: bool
) -> None:
    before = exported.read_bytes()
    with pytest.raises(InvalidDatabase, match=r"holds exported plans.*`plantune import`"):
        PlanDatabase.open(exported, read_only=read_only)
    assert [path.name for path in exported.parent.glob("cpu.db*")] == ["cpu.db"]
    assert exported.read_bytes() == before


def test_importing_twice_adds_nothing(exported: Path, target: PlanDatabase) -> None:
    assert import_plans(exported, target) == import_plans(exported, target)
    assert len(target.plans()) == 2


def test_an_imported_plan_is_the_newest(
    exported: Path, target: PlanDatabase, here: Environment, make_plan: MakePlan
) -> None:
    mine = make_plan(evidence=Attrs())
    target.put_plan(mine, here)
    import_plans(exported, target)
    found = target.find_plan(mine.problem, here)
    assert found is not None
    assert found.plan == make_plan()


def test_nothing_is_imported_into_a_database_that_is_open_for_reading(
    exported: Path, tmp_path: Path
) -> None:
    PlanDatabase.open(tmp_path / "other.db").close()
    other = PlanDatabase.open(tmp_path / "other.db", read_only=True)
    with other, pytest.raises(ReadOnlyDatabase):
        import_plans(exported, other)
