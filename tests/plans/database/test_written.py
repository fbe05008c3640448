"""Files that plantune 0.1 wrote still open, and the plans in them are found for the same calls:
inference and training, under autocast, with tf32, on other chips, predicted.
"""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plantune.base.canonical import Attrs
from plantune.base.outcome import Measured, Rejected
from plantune.base.paths import database_path
from plantune.devices.machine import Environment
from plantune.plans.checked_plan import check_plan
from plantune.plans.database.exports import export_plans, import_plans
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.plan_file import PlanFile, read_plan_file
from plantune.plans.database.stored import find_stored_plan
from plantune.plans.plan import Plan, is_for, named_as
from plantune.plans.written_words import FRAMEWORK, GUESS, MEASURED
from plantune.runtime.calls.choose import LosingPlan
from plantune.space.search_space import load_search_space

from .conftest import rows_of
from .written import CPU, ENTRIES, LOST, STAGES, trials_of

FILES = Path(__file__).parent / "data" / "of_0_1"
# By the names of the entries: the plan's id in the user's database, its digest and its graph's.
INDEX: dict[str, dict[str, Any]] = json.loads((FILES / "index.json").read_text("utf-8"))
ARCHS = ("cpu", "sm80", "sm90")
RUN_HERE = [name for name, entry in ENTRIES.items() if entry.arch == "cpu"]
# A plan as JSON is for the call that a module was made for, which is one without autocast.
RUN = [
    (kind, name)
    for kind in ("an export", "JSON", "the user's database")
    for name in RUN_HERE
    if kind != "JSON" or ENTRIES[name].autocast is None
]
# Plans that nobody searched for, as JSON: their digest, and what they are.
UNSEARCHED = {
    "a guess": ("e3410c952c829e94cae34e3fac79cadc949ea6e2321ad22c6773efea9b44c138", GUESS),
    "the frameworks": (
        "ba55ae29697466be7e76e7554da40fb389e6038c0b4149aa76151fadcd7f6248",
        FRAMEWORK,
    ),
}
TRIED = ("inference", "training under autocast", "tf32")


@pytest.fixture(autouse=True)
def _nobodys_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("PLANTUNE_PLANS", raising=False)


@pytest.fixture
def user(tmp_path: Path) -> Path:
    return Path(shutil.copy(FILES / "user.db", tmp_path))


def json_of(name: str) -> Path:
    return FILES / f"{name.replace(' ', '_')}.json"


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
    # Nobody wrote down under which of torch's settings it was timed: it is proved again.
    own = "compatible" if problem.precisions else "exact"
    for machine, match in ((here, own), (elsewhere(here), "compatible")):
        found = find_stored_plan(problem, machine, database=user)
        assert found is not None
        assert (found.id, found.match, found.plan.digest) == (kept["id"], match, kept["plan"])


def test_settings_count_for_float32_on_a_gpu_alone() -> None:
    heeding = {name for name, entry in ENTRIES.items() if entry.sought[1].precisions}
    assert heeding == {"tf32", "training in tf32"}


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
    assert (lost.route, lost.frozen_route) == ("eager", "torchscript")
    assert dict(lost.evidence) == LOST
    trained = plans[INDEX["training on a GPU"]["id"]]
    assert (trained.route, trained.branches) == ("program", True)
    assert trained.choices[0].times is not None
    assert plans[INDEX["predicted"]["id"]].origin == "predicted"


def test_a_partial_plan_is_listed_and_not_used(user: Path) -> None:
    with PlanDatabase.open(user) as database:
        partial = [item for item in database.plans() if item.status == "partial"]
    assert [item.plan.problem.graph for item in partial] == [INDEX["inference"]["graph"]]
    assert partial[0].plan.origin == FRAMEWORK
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
    path = json_of(name)
    plan = read_plan_file(path)
    assert isinstance(plan, Plan)
    assert (plan.digest, plan.dumps() + "\n") == (INDEX[name]["plan"], path.read_text("utf-8"))
    assert is_for(plan, ENTRIES[name].sought[0])


@pytest.mark.parametrize("name", UNSEARCHED)
def test_a_plan_that_nobody_searched_for_keeps_its_digest_and_its_text(name: str) -> None:
    """Both are written as `default`; which one it is follows from its kernels."""
    path, (digest, origin) = json_of(name), UNSEARCHED[name]
    plan = read_plan_file(path)
    assert isinstance(plan, Plan)
    assert (plan.digest, plan.origin, plan.written_origin) == (digest, origin, "default")
    assert plan.dumps() + "\n" == path.read_text("utf-8")
    graph, _ = ENTRIES["a GPU"].sought
    check_plan(plan, graph, load_search_space("sm90"))


@pytest.mark.parametrize("name", ENTRIES)
def test_a_team_finds_it_in_an_export(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, kept = ENTRIES[name], INDEX[name]
    _, problem = entry.sought
    monkeypatch.setenv("PLANTUNE_PLANS", str(FILES / f"{entry.arch}.db"))
    found = find_stored_plan(problem, entry.environment, database=tmp_path / "none.db")
    assert found is not None
    match = "compatible" if problem.precisions else "exact"
    assert (found.whose, found.match, found.plan.digest) == ("team", match, kept["plan"])


@pytest.mark.parametrize(("kind", "name"), RUN)
def test_a_user_runs_from_the_file(
    kind: str, name: str, user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On whatever machine the test is: the plan is proved there first."""
    entry = ENTRIES[name]
    file = read_plan_file(FILES / "cpu.db")
    assert isinstance(file, PlanFile)
    kept = file.plan_for(entry.sought[1], CPU)
    if kind == "the user's database":
        folder = tmp_path / "of the user"
        folder.mkdir()
        shutil.copy(user, folder / database_path().name)
        monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(folder))
        lost = "lost_to" in kept.evidence
        with pytest.warns(LosingPlan, match="1.25 of its time") if lost else nullcontext():
            pool = entry.called()
    else:
        pool = entry.called(plan=FILES / "cpu.db" if kind == "an export" else json_of(name))
    assert (pool.plan.choices, pool.plan.evidence) == (kept.choices, kept.evidence)
    assert pool.plan.origin == MEASURED
