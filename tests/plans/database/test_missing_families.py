"""Stored plans that name a kernel family which is not here any more are passed over: the next best
plan is found, one warning names them, and the trials of the family are never taken for others'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from plantune import optimize
from plantune.base.canonical import Attrs
from plantune.base.outcome import Measured
from plantune.devices.machine import Environment, cpu_environment
from plantune.errors import DatabaseWarning, InvalidPlan, NoPlan
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.kernels.family import Candidate
from plantune.plans.database import missing_families, stored
from plantune.plans.database.exports import export_plans, import_plans, write_export
from plantune.plans.database.merging import merged
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.plan_file import PlanFile, read_plan_file
from plantune.plans.database.rows import StoredPlan
from plantune.plans.database.stored import find_stored_plan, plans_of_team, stored_plans_in
from plantune.plans.guess import hand_plan
from plantune.plans.plan import Plan
from plantune.plans.step_times import StepTimes
from plantune.search.contenders.known import known_plans
from plantune.search.measuring import StoredTrials
from plantune.search.sought import Sought
from plantune.search.step_search import StepSearch
from plantune.space.search_space import SearchSpace, load_search_space

# 0.1 had it.
REMOVED = Candidate("hopper_conv_se", Attrs(tile_m=128, layout="nhwc", order=(0, 1)))
MakePlan = Callable[..., Plan]
SAID = "plan {} for net, batch 8.*passed over.*'hopper_conv_se' is not here.*plantune search"


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing_families, "_warned", set())


def of_old(plan: Plan, **changes: object) -> Plan:
    """The plan as a release wrote it that had the family."""
    first, *others = plan.choices
    return replace(plan, choices=(replace(first, candidate=REMOVED), *others), **changes)


@pytest.fixture
def old(plan: Plan) -> Plan:
    return of_old(plan)


def test_the_earlier_plan_is_found_in_its_place(
    database: PlanDatabase, path: Path, here: Environment, plan: Plan, old: Plan
) -> None:
    kept = database.put_plan(plan, here)
    passed_over = database.put_plan(old, here)
    with pytest.warns(DatabaseWarning, match=SAID.format(passed_over)) as caught:
        found = find_stored_plan(plan.problem, here, database=path)
    assert len(caught) == 1
    assert found == database.find_plan(plan.problem, here)  # without another warning
    assert found is not None
    assert (found.id, found.plan) == (kept, plan)


def test_a_compatible_plan_is_better_than_one_that_cannot_run(
    database: PlanDatabase, here: Environment, plan: Plan, old: Plan
) -> None:
    kept = database.put_plan(plan, replace(here, device="Another", device_digest="1" * 16))
    database.put_plan(old, here)
    with pytest.warns(DatabaseWarning, match="hopper_conv_se"):
        found = database.find_plan(plan.problem, here)
    assert found is not None
    assert (found.id, found.match) == (kept, "compatible")


def test_it_stays_listed_and_can_be_removed(
    database: PlanDatabase, here: Environment, old: Plan
) -> None:
    id = database.put_plan(old, here)
    assert [item.plan for item in database.plans()] == [old]
    database.remove_plan(id)
    assert database.plans() == ()


def test_an_export_does_without_it(
    database: PlanDatabase,
    target: PlanDatabase,
    tmp_path: Path,
    here: Environment,
    plan: Plan,
    old: Plan,
) -> None:
    database.put_plan(plan, here)
    database.put_plan(old, here)
    with pytest.warns(DatabaseWarning, match="hopper_conv_se"):
        assert export_plans(database, tmp_path / "cpu.db", "cpu") == (plan,)
    assert import_plans(tmp_path / "cpu.db", target) == (plan,)


@pytest.fixture
def exported(tmp_path: Path, here: Environment, make_plan: MakePlan, old: Plan) -> Path:
    """A file that a release with the family wrote: its plan first, then one for another batch."""
    made = [
        StoredPlan(n, p, here, "complete", "2026-11-29T00:00:00Z")
        for n, p in enumerate((old, make_plan(batch=16)), 1)
    ]
    write_export(tmp_path / "cpu.db", made)
    return tmp_path / "cpu.db"


def test_an_import_takes_the_others(
    exported: Path, target: PlanDatabase, make_plan: MakePlan
) -> None:
    with pytest.warns(DatabaseWarning, match=SAID.format(1)) as caught:
        assert import_plans(exported, target) == (make_plan(batch=16),)
    assert len(caught) == 1
    assert [item.plan for item in target.plans()] == [make_plan(batch=16)]


def test_a_given_file_has_the_others_alone(
    exported: Path, here: Environment, plan: Plan, make_plan: MakePlan
) -> None:
    with pytest.warns(DatabaseWarning, match=SAID.format(1)):
        file = read_plan_file(exported)
    assert isinstance(file, PlanFile)
    assert file.plan_for(make_plan(batch=16).problem, here) == make_plan(batch=16)
    with pytest.raises(NoPlan, match="has no plan for the layers of net, batch 8"):
        file.plan_for(plan.problem, here)


def test_a_file_of_such_plans_alone_is_refused_with_the_reason(
    tmp_path: Path, target: PlanDatabase, here: Environment, old: Plan
) -> None:
    path = tmp_path / "cpu.db"
    write_export(path, [StoredPlan(1, old, here, "complete", "2026-11-29T00:00:00Z")])
    with (
        pytest.warns(DatabaseWarning, match=SAID.format(1)),
        pytest.raises(InvalidPlan, match="names kernel families that are not here in each"),
    ):
        import_plans(path, target)
    with pytest.raises(NoPlan, match="no complete plan of kernels that are here"):
        read_plan_file(path)
    assert target.plans() == ()


def test_a_team_and_files_that_are_merged_do_without_it(
    exported: Path, make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTUNE_PLANS", str(exported))
    with pytest.warns(DatabaseWarning, match=SAID.format(1)) as caught:
        assert [item.plan for _, item in plans_of_team()] == [make_plan(batch=16)]
    assert len(caught) == 1
    assert [item.plan for item in merged([exported]).plans.values()] == [make_plan(batch=16)]


def test_a_shipped_plan_is_passed_over(
    tmp_path: Path, here: Environment, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if an arch's file had not been written anew."""
    monkeypatch.setattr(stored, "data_folder", lambda name: tmp_path)
    monkeypatch.delenv("PLANTUNE_PLANS", raising=False)
    gpu = replace(here, arch="sm90", device="A GPU")
    problem = replace(plan.problem, arch="sm90")
    old = of_old(plan, problem=problem)
    write_export(
        tmp_path / "sm90.db", [StoredPlan(1, old, gpu, "complete", "2026-11-29T00:00:00Z")]
    )
    with pytest.warns(DatabaseWarning, match=SAID.format(1)) as caught:
        assert find_stored_plan(problem, gpu, database=tmp_path / "none.db") is None
    assert len(caught) == 1
    assert stored_plans_in(tmp_path / "sm90.db") == []


def test_a_runner_up_of_such_a_family_is_shown_and_hinders_nothing(
    database: PlanDatabase, target: PlanDatabase, tmp_path: Path, here: Environment, plan: Plan
) -> None:
    first, *others = plan.choices
    timed = replace(first, times=StepTimes(1.5, 1.0, (REMOVED, 2.5)))
    made = replace(plan, choices=(timed, *others))
    database.put_plan(made, here)
    export_plans(database, tmp_path / "cpu.db", "cpu")
    (read,) = import_plans(tmp_path / "cpu.db", target)
    assert read.choices[0].times == timed.times


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 8, 3), nn.Linear(8 * 14 * 14, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.relu(self.conv(x)).flatten(1))


@pytest.fixture
def space() -> SearchSpace:
    return load_search_space("cpu")


@pytest.fixture
def net() -> nn.Module:
    return Net().eval()


@pytest.fixture
def own(net: nn.Module, space: SearchSpace) -> Plan:
    """A plan for the network, as a release with the family wrote it."""
    graph = extract(net, TensorType((2, 3, 16, 16)))
    return of_old(hand_plan(graph, space, network="Net"), origin="measured")


def test_a_call_is_right_without_it(
    net: nn.Module, own: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(tmp_path))
    with PlanDatabase.open() as database:
        database.put_plan(own, cpu_environment())
    x = torch.randn(2, 3, 16, 16)
    tuned = optimize(net, x)
    with pytest.warns(DatabaseWarning, match="'hopper_conv_se' is not here") as caught:
        first = tuned(x)
    assert len(caught) == 1
    for result in (first, tuned(x), tuned(x)):
        torch.testing.assert_close(result, net(x))
    assert tuned.plan.is_unsearched


def test_a_search_starts_without_it(net: nn.Module, own: Plan) -> None:
    sought = Sought(extract(net, TensorType((2, 3, 16, 16))), own.problem)
    with PlanDatabase.in_memory() as database:
        database.put_plan(own, cpu_environment())
        with pytest.warns(DatabaseWarning, match="'hopper_conv_se' is not here") as caught:
            found = known_plans(sought, cpu_environment(), database, shipped=False)
        assert len(caught) == 1
    assert found == []


def test_a_search_ignores_its_trials(net: nn.Module, space: SearchSpace) -> None:
    """Also where nothing else was measured: a time of a removed kernel is nobody else's."""
    graph = extract(net, TensorType((2, 3, 16, 16)))
    outcome = Measured(1e-3, 1e-3, 1e-3, 9, 1e-7, 1e-6, True, "cold")

    class Nothing:
        def measure(self, *args: object) -> Measured:
            raise AssertionError("nothing is measured here")

    with PlanDatabase.in_memory() as database:
        store = StoredTrials(database, cpu_environment(), fresh=False)
        for step in {
            c.step.signature: c.step for c in StepSearch(graph, space, Nothing(), store).candidates
        }.values():
            store.keep(step, REMOVED, outcome)
            assert store.known(step) == {REMOVED: outcome}
        search = StepSearch(graph, space, Nothing(), store)
    assert search.measured == 0
    assert search.costs.outcomes == {}
