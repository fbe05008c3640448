"""explain: what was tried for each step of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from plantune.environment import cpu_environment
from plantune.measure.outcome import Rejected
from plantune.plan import Plan
from plantune.plan_db import PlanDatabase
from plantune.plan_rows import Found
from plantune.problem import Problem
from plantune.report.steps import plan_steps
from plantune.space.search_space import load_search_space

from .conftest import Run, measured, object_of


@pytest.fixture
def story(store: Callable[..., int], plan: Plan, problem: Problem) -> str:
    """The name of a step of a stored plan, with three outcomes: chosen, slower, rejected."""
    from plantune.kernels.registry import candidates

    store(plan)
    step, chosen = next((s, c) for s, c in plan_steps(plan, problem.graph) if s.ops == ("conv2d",))
    others = [c for c in candidates(step, load_search_space("cpu")) if c != chosen]
    with PlanDatabase.open() as database:
        here = cpu_environment()
        database.put_trial(step.signature, chosen, here, measured(200.0))
        database.put_trial(step.signature, others[0], here, measured(250.0))
        wrong = Rejected("numerics", "'y'[0] is 7\ninstead of 8")
        database.put_trial(step.signature, others[1], here, wrong)
    return step.name


def test_a_step_has_its_outcomes_margin_and_roofline(run: Run, story: str) -> None:
    result = run("explain", "--batch", 1, "--step", story, "--json")
    assert result.exit_code == 0
    (step,) = object_of(result)["steps"]
    assert step["step"] == story
    assert step["chosen_us"] == 200.0
    assert step["margin"] == pytest.approx(0.25)
    assert step["roofline_us"] > 0
    assert [row["median_us"] for row in step["measured"]] == [200.0, 250.0]
    assert step["rejected"][0]["stage"] == "numerics"
    shown = run("explain", "--batch", 1, "--step", story).stdout
    for words in ("the runner-up is 25.0 % slower", "numerics: 'y'[0] is 7 instead of 8"):
        assert words in shown


def test_every_step_of_the_plan_is_told(run: Run, story: str, plan: Plan) -> None:
    result = run("explain", 1, "--json")
    data = object_of(result)
    told = {tuple(step["nodes"]) for step in data["steps"]}
    assert told == {choice.nodes for choice in plan.choices}
    assert data["plan_id"] == 1
    assert "no time of it is stored here" in run("explain", 1).stdout


def test_a_step_that_is_not_there_is_wrong_usage(run: Run, story: str) -> None:
    assert run("explain", 1, "--step", "layer9").exit_code == 2


def test_a_plan_of_another_network_is_4(run: Run, store: Callable[..., int], plan: Plan) -> None:
    from .conftest import changed

    id = store(changed(plan, graph="c" * 64))
    result = run("explain", id)
    assert result.exit_code == 4
    assert "--in-channels" in result.stderr


@pytest.mark.parametrize("channels", [1, 11, 14])
def test_other_channels_are_found(run: Run, store: Callable[..., int], channels: int) -> None:
    from plantune.planning import default_plan

    other = Problem("se_resnet9_fixup", 1, in_channels=channels)
    space = load_search_space("cpu")
    id = store(default_plan(other.graph, space, network=other.network))
    assert run("explain", id, "--step", "stem").exit_code == 0


def test_an_exact_shipped_plan_comes_before_an_own_one_of_other_versions(
    run: Run,
    store: Callable[..., int],
    plan: Plan,
    fused_plan: Plan,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As load_model takes them."""
    own = store(plan, replace(cpu_environment(), torch="2.0.0"))
    assert object_of(run("explain", "--batch", 1, "--json"))["plan_id"] == own
    shipped = Found(fused_plan, cpu_environment(), "exact", 1)
    monkeypatch.setattr("plantune.stored_plans.find_stored_plan", lambda *_, **__: shipped)
    assert object_of(run("explain", "--batch", 1, "--json"))["plan_id"] is None
