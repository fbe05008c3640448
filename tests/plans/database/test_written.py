"""Files that plantune 0.1 wrote still open, and the plans in them are found for the same calls
(F58): inference and training, under autocast, with tf32, on other chips, predicted.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plantune.base.canonical import Attrs
from plantune.base.outcome import Measured, Rejected
from plantune.devices.machine import Environment
from plantune.plans.database.exports import export_plans, import_plans
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.plan_file import PlanFile, read_plan_file
from plantune.plans.database.stored import find_stored_plan
from plantune.plans.plan import Plan, check_plan, is_for, named_as
from plantune.space.search_space import load_search_space

from .conftest import rows_of
from .written import CPU, ENTRIES, LOST, STAGES, trials_of

FILES = Path(__file__).parent / "data" / "of_0_1"
# By the names of the entries: the plan's id in the user's database, its digest and its graph's.
INDEX: dict[str, dict[str, Any]] = json.loads((FILES / "index.json").read_text("utf-8"))
ARCHS = ("cpu", "sm80", "sm90")
RUN_HERE = [name for name, entry in ENTRIES.items() if entry.arch == "cpu"]
TRIED = ("inference", "training under autocast", "tf32")


@pytest.fixture(autouse=True)
def _nobodys_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("PLANTUNE_PLANS", raising=False)


@pytest.fixture
def user(tmp_path: Path) -> Path:
    return Path(shutil.copy(FILES / "user.db", tmp_path))


def elsewhere(environment: Environment) -> Environment:
    """Another machine with a processor of the same arch."""
    gpu = Attrs({**environment.gpu, "driver": "590.2"} if environment.gpu else {})
    return replace(environment, device="Another", device_digest="1" * 16, threads=64, gpu=gpu)


def test_each_entry_has_a_plan_there() -> None:
    assert set(INDEX) == set(ENTRIES)


@pytest.mark.parametrize("name", ENTRIES)
def test_a_call_finds_its_plan(user: Path, name: str) -> None:
    entry, kept = ENTRIES[name], INDEX[name]
    graph, problem = entry.sought
    assert graph.digest == problem.graph == kept["graph"]
    here = entry.environment
    for machine, match in ((here, "exact"), (elsewhere(here), "compatible")):
        found = find_stored_plan(problem, machine, database=user)
        assert found is not None
        assert (found.id, found.match, found.plan.digest) == (kept["id"], match, kept["plan"])


@pytest.mark.parametrize("name", ENTRIES)
def test_its_kernels_fit_the_layers(user: Path, name: str) -> None:
    entry = ENTRIES[name]
    graph, problem = entry.sought
    found = find_stored_plan(problem, entry.environment, database=user)
    assert found is not None
    plan = named_as(found.plan, graph)
    check_plan(plan, graph, load_search_space(entry.arch))
    assert plan.choices == found.plan.choices


def test_on_another_arch_it_is_foreign(user: Path) -> None:
    graph, problem = ENTRIES["inference"].sought
    foreign = replace(CPU, arch="sm70", device="A GPU")
    found = find_stored_plan(replace(problem, arch="sm70"), foreign, database=user)
    assert found is not None
    assert (found.match, is_for(found.plan, graph)) == ("foreign", True)


def test_tf32_and_autocast_are_in_their_plans(user: Path) -> None:
    with PlanDatabase.open(user) as database:
        plans = {item.id: item.plan for item in database.plans()}
    rounded = plans[INDEX["tf32"]["id"]]
    assert "tf32" in {choice.candidate.config.get("math") for choice in rounded.choices}
    graph, _ = ENTRIES["inference under autocast"].sought
    assert "bfloat16" in {type_.dtype for type_ in graph.types.values()}
    assert graph.digest != INDEX["inference"]["graph"]


def test_who_runs_and_why_is_kept(user: Path) -> None:
    with PlanDatabase.open(user) as database:
        plans = {item.id: item.plan for item in database.plans()}
    lost = plans[INDEX["another batch"]["id"]]
    assert (lost.runner, lost.frozen_runner) == ("eager", "torchscript")
    assert dict(lost.evidence) == LOST
    trained = plans[INDEX["training on a GPU"]["id"]]
    assert (trained.runner, trained.branches) == ("program", True)
    assert trained.choices[0].times is not None
    assert plans[INDEX["predicted"]["id"]].origin == "predicted"


def test_a_partial_plan_is_listed_and_not_used(user: Path) -> None:
    with PlanDatabase.open(user) as database:
        partial = [item for item in database.plans() if item.status == "partial"]
    assert [item.plan.problem.graph for item in partial] == [INDEX["inference"]["graph"]]
    assert partial[0].id not in {kept["id"] for kept in INDEX.values()}


@pytest.mark.parametrize("name", TRIED)
def test_trials_are_read_for_their_steps(user: Path, name: str) -> None:
    entry = ENTRIES[name]
    wanted = trials_of(entry)
    with PlanDatabase.open(user) as database:
        for signature, candidate, outcome in wanted:
            assert database.trials(signature, entry.environment)[candidate] == outcome
    outcomes = [outcome for _, _, outcome in wanted]
    assert {o.stage for o in outcomes if isinstance(o, Rejected)} == set(STAGES)
    assert any(isinstance(o, Measured) for o in outcomes)
    assert len(rows_of(user, "trials")) == len(TRIED) * len(wanted)


@pytest.mark.parametrize("arch", ARCHS)
def test_an_export_is_imported_and_written_again_as_it_was(tmp_path: Path, arch: str) -> None:
    with PlanDatabase.in_memory() as database:
        imported = import_plans(FILES / f"{arch}.db", database)
        wanted = {INDEX[name]["plan"] for name, entry in ENTRIES.items() if entry.arch == arch}
        assert {plan.digest for plan in imported} == wanted
        export_plans(database, tmp_path / "again.db", arch)
    assert (tmp_path / "again.db").read_bytes() == (FILES / f"{arch}.db").read_bytes()


@pytest.mark.parametrize("name", ENTRIES)
def test_a_plan_as_json_keeps_its_digest_and_its_text(name: str) -> None:
    path = FILES / f"{name.replace(' ', '_')}.json"
    plan = read_plan_file(path)
    assert isinstance(plan, Plan)
    assert (plan.digest, plan.dumps() + "\n") == (INDEX[name]["plan"], path.read_text("utf-8"))
    assert is_for(plan, ENTRIES[name].sought[0])


@pytest.mark.parametrize("name", RUN_HERE)
def test_a_user_runs_from_the_file(name: str) -> None:
    """On whatever machine the test is: the plan is proved there first."""
    entry = ENTRIES[name]
    file = read_plan_file(FILES / "cpu.db")
    assert isinstance(file, PlanFile)
    kept = file.plan_for(entry.sought[1], CPU)
    stock = entry.called(plan=FILES / "cpu.db")
    assert (stock.plan.choices, stock.plan.evidence) == (kept.choices, kept.evidence)
