"""explain: what was tried for each step of a plan."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from plantune.base.canonical import Attrs
from plantune.base.outcome import Rejected
from plantune.devices.machine import cpu_environment
from plantune.graph.fusions import all_fusions
from plantune.graph.partition import alternatives
from plantune.kernels.family import Candidate
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.rows import Found
from plantune.plans.guess import hand_plan
from plantune.plans.plan import Plan
from plantune.plans.workload import Workload
from plantune.report.steps import plan_steps
from plantune.space.search_space import load_search_space

from .conftest import ROOT, Run, measured, object_of


@pytest.fixture
def story(store: Callable[..., int], plan: Plan, problem: Workload) -> str:
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
    words_of_all = "wrong numbers: 'y'[0] is 7 instead of 8"
    assert words_of_all in run("explain", "--batch", 1, "--step", story, "--whole").stdout
    for words in ("the runner-up is 25.0 % slower", "25.0 % slower", words_of_all):
        assert words in shown


def test_every_step_of_the_plan_is_told(run: Run, story: str, plan: Plan) -> None:
    result = run("explain", 1, "--json")
    data = object_of(result)
    told = {tuple(step["nodes"]) for step in data["steps"]}
    assert told == {choice.nodes for choice in plan.choices}
    assert data["plan_id"] == 1
    assert "~ is an estimate" in run("explain", 1).stdout


def test_the_ten_longest_steps_are_shown_unless_all_are_asked_for(
    run: Run, story: str, plan: Plan
) -> None:
    def told(*options: str) -> list[str]:
        lines = run("explain", 1, *options).stdout.splitlines()
        start = next(n for n, line in enumerate(lines) if line.startswith("step "))
        return lines[start + 1 : lines.index("", start)]

    rows = told()
    assert len(rows) == 10
    steps = object_of(run("explain", 1, "--json"))["steps"]
    rows = told("--all")
    assert len(rows) == len(steps) > 10
    (measured,) = [row for row in rows if "~" not in row]  # a guess stands for times not stored
    assert measured.startswith(story)
    assert " 200 us " in measured


def test_a_summary_comes_before_the_steps(run: Run, story: str) -> None:
    lines = run("explain", 1).stdout.splitlines()
    summary = next(n for n, line in enumerate(lines) if line.startswith("10 steps of"))
    assert summary < lines.index("")
    assert "--all" in lines[summary]


def test_fused_candidates_and_parts_are_told_with_their_place(
    run: Run, store: Callable[..., int], fused_plan: Plan, problem: Workload
) -> None:
    """Whatever was tried over the same ops: their parts, and fusions with the neighbours."""
    store(fused_plan)
    steps = plan_steps(fused_plan, problem.graph)
    step, chosen = next((s, c) for s, c in steps if len(s.nodes) > 2)
    here = cpu_environment()
    with PlanDatabase.open() as database:
        for planned, candidate in steps:
            database.put_trial(planned.signature, candidate, here, measured(90.0))
        database.put_trial(step.signature, chosen, here, measured(100.0))
        for other in alternatives(problem.graph, tuple(all_fusions())):
            if {node.name for node in other.nodes} < {node.name for node in step.nodes}:
                framework = Candidate("framework", Attrs(layout="nchw"))
                us = 60.0 * len(other.nodes)
                database.put_trial(other.signature, framework, here, measured(us))
    (told,) = object_of(run("explain", 1, "--step", step.name, "--json"))["steps"]
    parts = [cover for cover in told["other_covers"] if cover["relation"] == "part"]
    assert parts
    assert all(set(cover["nodes"]) < set(told["nodes"]) for cover in parts)
    shown = run("explain", 1, "--step", step.name).stdout
    assert "its ops in parts" in shown
    slower = 60.0 * len(step.nodes) / 100.0 - 1
    assert f"{100 * slower:.1f} % slower" in shown


def test_a_plan_for_a_gpu_tells_what_nchw_filters_cost(run: Run, store: Callable[..., int]) -> None:
    problem = Workload("se_resnet9_fixup", 128, 3, "infer", "float16", "sm90")
    made = hand_plan(problem.graph, load_search_space("sm90"), network=problem.network)
    there = replace(cpu_environment(), arch="sm90", device="H200")
    id = store(made, there)
    packing = object_of(run("explain", id, "--json"))["nchw_packing"]
    assert 0 < packing["filters"] <= len(made.choices)
    assert packing["bytes"] < 10e6
    assert "to(memory_format=torch.channels_last) saves that" in run("explain", id).stdout


def test_a_step_that_is_not_there_is_wrong_usage(run: Run, story: str) -> None:
    assert run("explain", 1, "--step", "layer9").exit_code == 2


def test_a_plan_of_another_network_is_4(run: Run, store: Callable[..., int], plan: Plan) -> None:
    from .conftest import changed

    id = store(changed(plan, graph="c" * 64))
    result = run("explain", id)
    assert result.exit_code == 4
    assert "search again" in result.stderr


@pytest.mark.parametrize("channels", [1, 11, 14])
def test_other_channels_are_found(run: Run, store: Callable[..., int], channels: int) -> None:
    from plantune.plans.guess import framework_plan

    other = Workload("se_resnet9_fixup", 1, in_channels=channels)
    space = load_search_space("cpu")
    id = store(framework_plan(other.graph, space, network=other.network))
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
    monkeypatch.setattr("plantune.plans.database.stored.find_stored_plan", lambda *_, **__: shipped)
    assert object_of(run("explain", "--batch", 1, "--json"))["plan_id"] is None


WITHOUT_CALLS = ROOT / "tests" / "plans" / "database" / "data" / "without_calls" / "user.db"


def test_a_plan_from_before_calls_were_kept_is_told_with_its_channels(
    run: Run, tmp_path: Path
) -> None:
    path = shutil.copy(WITHOUT_CALLS, tmp_path)
    told = object_of(run("explain", 1, "--db", path, "--json"))
    assert any(step["chosen_us"] for step in told["steps"])
    refused = run("explain", 2, "--db", path)
    assert refused.exit_code == 4
    assert "give --in-channels" in refused.stderr
    assert run("explain", 2, "--db", path, "--in-channels", 11, "--step", "stem").exit_code == 0
