"""A search's database sees what is in the file, and goes on without it."""

from __future__ import annotations

import pytest

from plantune.devices.machine import cpu_environment
from plantune.errors import DatabaseUnavailable
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.plan import Plan
from plantune.search.keeping import KeepingDatabase


def test_known_plans_come_from_the_file(plan: Plan) -> None:
    here = cpu_environment()
    with PlanDatabase.in_memory() as file:
        file.put_plan(plan, here)
        keeping = KeepingDatabase(file, print)
        (row,) = keeping.plans()
        found = keeping.find_plan(plan.problem, here)
        assert found is not None
        assert row.plan == found.plan == plan


def test_without_the_file_nothing_is_known(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*arguments: object) -> None:
        raise DatabaseUnavailable("the disk is gone")

    said: list[str] = []
    with PlanDatabase.in_memory() as file:
        monkeypatch.setattr(file, "plans", gone)
        keeping = KeepingDatabase(file, said.append)
        assert keeping.plans() == ()
        assert keeping.find_plan(plan.problem, cpu_environment()) is None
    assert said == ["the disk is gone. The search goes on in memory."]
