"""Thousands of stored plans: ids are given once, a call reads few rows, exports can be read."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from plantune.base.canonical import Attrs
from plantune.devices.machine import Environment
from plantune.errors import DamagedRow, PlantuneError
from plantune.plans.database import exports, rows
from plantune.plans.database.exports import export_plans, import_plans
from plantune.plans.database.finding import find_plan
from plantune.plans.database.plan_database import PlanDatabase, lies_in_file
from plantune.plans.database.rows import StoredPlan
from plantune.plans.database.stored import find_stored_plan
from plantune.plans.plan import Plan

from .conftest import Process, rows_of

DATA = Path(__file__).parent / "data"
MakePlan = Callable[..., Plan]
MANY = 200


def taking(ms: float, make_plan: MakePlan, **fields: object) -> Plan:
    return make_plan(evidence=Attrs(median_ms=ms), **fields)


def put_many(database: PlanDatabase, plans: list[Plan], environment: Environment) -> None:
    database.put_plans([StoredPlan(0, plan, environment, "complete", "2026") for plan in plans])


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts of the plans that were read since."""
    texts: list[str] = []
    loads = Plan.loads

    def counted(text: str) -> Plan:
        texts.append(text)
        return loads(text)

    monkeypatch.setattr(Plan, "loads", staticmethod(counted))
    return texts


def indexes(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as connection:
        query = "SELECT name FROM sqlite_schema WHERE type = 'index' AND sql IS NOT NULL"
        return {name for (name,) in connection.execute(query)} & {rows.PLANS_INDEX}


def test_the_id_of_a_removed_plan_is_never_given_again(
    path: Path, here: Environment, plan: Plan
) -> None:
    with PlanDatabase.open(path) as database:
        first, second = (database.put_plan(plan, here) for _ in range(2))
        database.remove_plan(second)
        third = database.put_plan(plan, here)
        assert len({first, second, third}) == 3
        database.remove_plan(first)
        database.remove_plan(third)
    with PlanDatabase.open(path) as database:
        assert database.put_plan(plan, here) not in (first, second, third)


def test_nor_is_one_that_was_removed_before_ids_were_kept(
    path: Path, here: Environment, plan: Plan
) -> None:
    with PlanDatabase.open(path) as database:
        ids = [database.put_plan(plan, here) for _ in range(3)]
    with closing(sqlite3.connect(path)) as connection:  # as an earlier release left it
        connection.execute("DELETE FROM meta WHERE key = 'highest_plan_id'")
        connection.commit()
    with PlanDatabase.open(path) as database:
        database.remove_plan(ids[-1])
        assert database.put_plan(plan, here) not in ids


@pytest.mark.parametrize("kept", ["", "many", "-1", "9" * 25, "2", None])
def test_a_spoilt_note_of_ids_never_gives_an_id_that_is_in_use(
    path: Path, here: Environment, plan: Plan, kept: str | None
) -> None:
    with PlanDatabase.open(path) as database:
        ids = [database.put_plan(plan, here) for _ in range(3)]
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE meta SET value = ? WHERE key = 'highest_plan_id'", [kept])
        connection.commit()
    with PlanDatabase.open(path) as database:
        assert database.put_plan(plan, here) not in ids
        assert len(database.plans()) == 4


def test_ids_are_unique_among_processes_that_remove_and_add(
    path: Path, start: Callable[..., Process]
) -> None:
    PlanDatabase.open(path).close()
    script = """
with PlanDatabase.open(path) as database:
    ids = []
    for _ in range(10):
        ids.append(database.put_plan(PLAN, HERE))
        database.remove_plan(ids[-1])
print(*ids)
"""
    processes = [start(script, path) for _ in range(3)]
    given = [id for process in processes for id in process.communicate()[0].split()]
    assert len(given) == 30
    assert len(set(given)) == 30


def test_a_call_reads_the_newest_plan_of_thousands_for_its_layers(
    path: Path, here: Environment, make_plan: MakePlan, parsed: list[str]
) -> None:
    with PlanDatabase.open(path) as database:
        put_many(database, [taking(float(ms), make_plan) for ms in range(1, MANY)], here)
    parsed.clear()
    found = find_stored_plan(make_plan().problem, here, database=path)
    assert found is not None
    assert found.plan == taking(float(MANY - 1), make_plan)
    assert len(parsed) == 1


def test_the_newest_of_each_machine_and_origin_is_among_what_is_read(
    database: PlanDatabase, here: Environment, make_plan: MakePlan
) -> None:
    near, far = replace(here, threads=4), replace(here, device="Another CPU")
    measured, predicted = taking(1.0, make_plan), make_plan(origin="predicted")
    put_many(database, [measured, predicted], here)
    assert database.find_plan(measured.problem, here).plan == measured  # type: ignore[union-attr]
    put_many(database, [taking(2.0, make_plan)], near)
    put_many(database, [taking(3.0, make_plan)], far)
    assert database.find_plan(measured.problem, here).plan == measured  # type: ignore[union-attr]
    there = database.find_plan(measured.problem, far)
    assert there is not None
    assert (there.plan, there.match) == (taking(3.0, make_plan), "exact")


def test_where_the_newest_row_is_damaged_the_one_before_is_used(
    path: Path, here: Environment, make_plan: MakePlan
) -> None:
    with PlanDatabase.open(path) as database:
        put_many(database, [taking(float(ms), make_plan) for ms in (1, 2, 3)], here)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE plans SET baseline_ms = 7 WHERE id > 1")
        connection.commit()
    with pytest.warns(DamagedRow, match="2 of the rows in plans") as caught:
        found = find_stored_plan(make_plan().problem, here, database=path)
    assert len(caught) == 1
    assert found is not None
    assert found.plan == taking(1.0, make_plan)


def test_plans_are_found_by_an_index(path: Path, here: Environment, plan: Plan) -> None:
    with PlanDatabase.open(path) as database:
        database.put_plan(plan, here)
    asked: list[str] = []
    with closing(rows.connect_read_only(path, 1.0)) as connection:
        connection.set_trace_callback(asked.append)
        assert find_plan(connection, plan.problem, here) is not None
        connection.set_trace_callback(None)
        queries = [query for query in asked if "FROM plans" in query]
        how = [
            str(row[-1]) for q in queries for row in connection.execute(f"EXPLAIN QUERY PLAN {q}")
        ]
    assert queries
    assert any(f"USING COVERING INDEX {rows.PLANS_INDEX}" in line for line in how)


def test_an_older_database_gets_the_index_when_it_is_opened_for_writing(
    path: Path, here: Environment, make_plan: MakePlan
) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((DATA / "schema_1.sql").read_text())
    version = rows_of(path, "meta")
    with PlanDatabase.open(path, read_only=True) as database:  # works without it
        assert len(database.plans()) == 1
        assert database.find_plan(make_plan().problem, here) is not None
    assert indexes(path) == set()
    PlanDatabase.open(path).close()
    assert indexes(path) == {rows.PLANS_INDEX}
    assert rows_of(path, "meta") == version


def test_a_plan_is_looked_up_by_its_id_without_reading_all(
    database: PlanDatabase, here: Environment, make_plan: MakePlan, parsed: list[str]
) -> None:
    put_many(database, [taking(float(ms), make_plan) for ms in range(1, MANY)], here)
    parsed.clear()
    stored = database.plan(7)
    assert stored is not None
    assert stored.plan == taking(7.0, make_plan)
    assert database.plan(MANY + 1) is None
    assert len(parsed) == 1


def test_whether_plans_are_in_a_file_is_seen_in_one_look(
    path: Path, here: Environment, make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = [taking(float(ms), make_plan) for ms in range(1, 20)]
    with PlanDatabase.open(path) as database:
        put_many(database, plans, here)
    opened: list[Path] = []
    open_ = PlanDatabase.open

    def counted(path: Path, **how: bool) -> PlanDatabase:
        opened.append(path)
        return open_(path, **how)

    monkeypatch.setattr(PlanDatabase, "open", staticmethod(counted))
    assert lies_in_file(path, *plans)
    assert not lies_in_file(path, *plans, taking(99.0, make_plan))
    assert len(opened) == 2


def test_what_an_export_of_many_plans_writes_can_be_imported(
    database: PlanDatabase,
    target: PlanDatabase,
    tmp_path: Path,
    here: Environment,
    make_plan: MakePlan,
) -> None:
    choice = make_plan().choices[0]
    nodes = tuple(f"{number:0>450}/conv2d" for number in range(13_000))
    large = (replace(choice, nodes=nodes),)
    for batch in (1, 2, 3):
        database.put_plan(make_plan(batch=batch, choices=large), here)
    plans = export_plans(database, tmp_path / "cpu.db", "cpu")
    assert (tmp_path / "cpu.db").stat().st_size > 16 << 20
    assert import_plans(tmp_path / "cpu.db", target) == plans
    assert export_plans(database, tmp_path / "cpu.db", "cpu") == plans  # over the one before


@pytest.mark.parametrize("limit", ["SIZE_LIMIT_BYTES", "PLANS_LIMIT"])
def test_an_export_that_no_import_would_take_is_not_written(
    database: PlanDatabase,
    tmp_path: Path,
    here: Environment,
    make_plan: MakePlan,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
) -> None:
    for batch in (1, 2, 3):
        database.put_plan(make_plan(batch=batch), here)
    monkeypatch.setattr(exports, limit, 2)
    with pytest.raises(PlantuneError, match="--model"):
        export_plans(database, tmp_path / "cpu.db", "cpu")
    assert not (tmp_path / "cpu.db").exists()
