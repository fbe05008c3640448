"""Files from before plans kept the types of their call, and when names counted in the digest of a
graph, still open and match. Those for training open; gradients are other graphs since, so
they are searched for again.

They were written by searches on a CPU: se_resnet9_fixup at batch 2, at batch 1 with 11 channels,
and for training. There are 32 trials, and the first plan once more as a partial one.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from plantune.graph.graph import Graph
from plantune.plans.checked_plan import check_plan
from plantune.plans.database.exports import export_plans, import_plans
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.plan_file import PlanFile, read_plan_file
from plantune.plans.database.rows import StoredPlan
from plantune.plans.database.stored import find_stored_plan
from plantune.plans.plan import Plan, is_for, named_as
from plantune.plans.workload import Workload
from plantune.space.search_space import load_search_space

from .conftest import rows_of

FILES = Path(__file__).parent / "data" / "without_calls"
NETWORK = "se_resnet9_fixup"
WORKLOADS = {1: Workload(NETWORK, 2), 2: Workload(NETWORK, 1, 11)}
TRAINING = 3
DIGEST = "269379179c9bfdda8b8e44991110ac3270bb40dfbd8406e7404b882ba88fc653"


@pytest.fixture
def user(tmp_path: Path) -> Path:
    return Path(shutil.copy(FILES / "user.db", tmp_path))


def complete(database: PlanDatabase) -> dict[int, StoredPlan]:
    return {item.id: item for item in database.plans() if item.status == "complete"}


def test_every_plan_is_there_and_found_for_its_call(user: Path) -> None:
    with PlanDatabase.open(user) as database:
        stored = complete(database)
        assert set(stored) == {*WORKLOADS, TRAINING}
        assert stored[TRAINING].plan.problem.mode == "train"
        for id, workload in WORKLOADS.items():
            found = database.find_plan(workload.problem, stored[id].environment)
            assert found is not None
            assert (found.id, found.match, found.plan.problem.call) == (id, "exact", None)
            own = named_as(found.plan, workload.graph)
            check_plan(own, workload.graph, load_search_space("cpu"))
            assert own.choices == found.plan.choices


def test_the_runtime_finds_them_too(user: Path) -> None:
    with PlanDatabase.open(user) as database:
        there = complete(database)[1].environment
    found = find_stored_plan(WORKLOADS[1].problem, there, database=user)
    assert found is not None
    assert (found.id, found.match) == (1, "exact")


def test_trials_are_kept(user: Path) -> None:
    with PlanDatabase.open(user) as database:
        there = complete(database)[1].environment
        signatures = {row["step"] for row in rows_of(user, "trials")}
        assert sum(len(database.trials(each, there)) for each in signatures) == 32


def test_a_plan_with_its_call_takes_the_place_of_one_without(user: Path, tmp_path: Path) -> None:
    with PlanDatabase.open(user) as database:
        before = complete(database)[1]
        made = Plan(WORKLOADS[1].problem, before.plan.choices, "measured")
        database.put_plan(made, before.environment)
        found = database.find_plan(WORKLOADS[1].problem, before.environment)
        assert found is not None
        assert found.plan.problem.call == WORKLOADS[1].graph.inputs
        assert made in export_plans(database, tmp_path / "cpu.db", "cpu")
    file = read_plan_file(tmp_path / "cpu.db")
    assert isinstance(file, PlanFile)
    assert file.plan_for(WORKLOADS[1].problem, before.environment) == made


def test_an_exported_file_is_imported_and_written_again_as_it_was(tmp_path: Path) -> None:
    with PlanDatabase.in_memory() as database:
        imported = import_plans(FILES / "exported.db", database)
        assert {plan.problem.call for plan in imported} == {None}
        export_plans(database, tmp_path / "cpu.db", "cpu")
    assert (tmp_path / "cpu.db").read_bytes() == (FILES / "exported.db").read_bytes()


def test_an_exported_file_serves_as_a_plan(user: Path) -> None:
    file = read_plan_file(FILES / "exported.db")
    assert isinstance(file, PlanFile)
    with PlanDatabase.open(user) as database:
        stored = complete(database)
    for id, workload in WORKLOADS.items():
        assert file.plan_for(workload.problem, stored[id].environment) == stored[id].plan


def test_a_plan_as_json_keeps_its_digest_and_fits() -> None:
    """What was proved of it stays proved."""
    plan, graph = read_plan_file(FILES / "plan.json"), WORKLOADS[1].graph
    assert isinstance(plan, Plan)
    assert isinstance(graph, Graph)
    assert (plan.digest, plan.problem.graph) == (DIGEST, graph.named_digest)
    assert is_for(plan, graph)
    check_plan(named_as(plan, graph), graph, load_search_space("cpu"))
