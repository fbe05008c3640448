"""Torch's settings for products of float32 belong to what depends on them, and to nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plantune.base.canonical import Attrs
from plantune.base.outcome import Measured, Outcome
from plantune.devices.cuda.flags import planned_for
from plantune.devices.machine import Environment
from plantune.errors import InvalidPlan
from plantune.graph.builder import GraphBuilder
from plantune.graph.graph import Graph
from plantune.graph.step import Step, make_step
from plantune.graph.types import TensorType
from plantune.kernels.family import Candidate
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.stored import find_stored_plan
from plantune.plans.plan import Choice, Plan
from plantune.plans.precisions import precisions_of, trial_key
from plantune.plans.problem import Problem
from plantune.search.measuring import StoredTrials

IEEE, TF32 = ("ieee",) * 3, ("tf32", "ieee", "tf32")
GPU = Environment("sm90", "A GPU", "0" * 16, 0, "2.13.0", "0.1.0", "NVRTC", "Linux x86_64")
FRAMEWORK = Candidate("framework", Attrs(layout="nchw"))
TIMED = Measured(3.5, 3.25, 4.0, 20, 1e-7, 1e-6, True, cache="warm")


def product(dtype: str) -> Graph:
    b = GraphBuilder()
    x, w = b.input("x", TensorType((4, 8), dtype)), b.input("w", TensorType((8, 2), dtype))
    return b.build(b.emit("matmul", x, w, transpose_a=False, transpose_b=False))


def step_of(build: Callable[[GraphBuilder], tuple[str, ...]]) -> Step:
    b = GraphBuilder()
    graph = b.build(build(b))
    return make_step(graph, [node.name for node in graph.nodes])


@pytest.fixture(autouse=True)
def _nobodys_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(tmp_path))


def plan_of(graph: Graph) -> Plan:
    names = tuple(node.name for node in graph.nodes)
    return Plan(Problem.of(graph, "sm90", "net"), (Choice(names, FRAMEWORK),), "measured")


@pytest.mark.parametrize(
    ("dtype", "arch", "kept"),
    [("float32", "sm90", TF32), ("float32", "cpu", ()), ("float16", "sm90", ())],
)
def test_they_belong_to_products_of_float32_on_a_gpu(
    dtype: str, arch: str, kept: tuple[str, ...]
) -> None:
    with planned_for(TF32):
        assert Problem.of(product(dtype), arch, "net").precisions == kept


@pytest.mark.parametrize(
    ("op", "inputs", "attrs"),
    [("relu", 1, {}), ("add", 2, {}), ("tanh", 1, {})],
)
def test_what_multiplies_nothing_depends_on_none(
    op: str, inputs: int, attrs: dict[str, Any]
) -> None:
    def build(b: GraphBuilder) -> tuple[str, ...]:
        return b.emit(op, *(b.input(f"x{i}", TensorType((2, 3))) for i in range(inputs)), **attrs)

    assert precisions_of(step_of(build), "sm90") == ()


def test_what_was_never_set_is_plain_float32() -> None:
    with planned_for(("none", "tf32", "none")):
        assert precisions_of(product("float32"), "sm90") == ("ieee", "tf32", "ieee")


def test_each_setting_finds_its_own_plan() -> None:
    graph, found = product("float32"), {}
    with PlanDatabase.open() as database:
        for precisions in (IEEE, TF32):
            with planned_for(precisions):
                found[precisions] = database.put_plan(plan_of(graph), GPU)
    for precisions, id in found.items():
        with planned_for(precisions):
            plan = find_stored_plan(Problem.of(graph, "sm90", "net"), GPU)
        assert plan is not None
        assert (plan.id, plan.match, plan.plan.problem.precisions) == (id, "exact", precisions)


def test_another_setting_finds_nothing() -> None:
    graph = product("float32")
    with PlanDatabase.open() as database, planned_for(TF32):
        database.put_plan(plan_of(graph), GPU)
    with planned_for(IEEE):
        assert find_stored_plan(Problem.of(graph, "sm90", "net"), GPU) is None


def test_a_plan_that_does_not_say_is_proved_first() -> None:
    graph = product("float32")
    plan = plan_of(graph)
    with PlanDatabase.open() as database:
        database.put_plan(replace(plan, problem=replace(plan.problem, precisions=())), GPU)
    for precisions in (IEEE, TF32):
        with planned_for(precisions):
            found = find_stored_plan(Problem.of(graph, "sm90", "net"), GPU)
        assert found is not None
        assert found.match == "compatible"


def test_a_plan_that_says_comes_before_one_that_does_not() -> None:
    graph = product("float32")
    with planned_for(TF32):
        plan = plan_of(graph)
        with PlanDatabase.open() as database:
            own = database.put_plan(plan, GPU)
            database.put_plan(replace(plan, problem=replace(plan.problem, precisions=())), GPU)
        found = find_stored_plan(plan.problem, GPU)
    assert found is not None
    assert (found.id, found.match) == (own, "exact")


def test_a_plan_is_written_with_them() -> None:
    with planned_for(TF32):
        plan = plan_of(product("float32"))
    assert plan.to_json()["format"] == 6
    again = Plan.loads(plan.dumps())
    assert (again, again.problem.precisions) == (plan, TF32)


@pytest.mark.parametrize("wrong", [["tf32"], ["tf32", "ieee", "fp8"], ["tf32", "ieee", 1]])
def test_others_are_refused(wrong: list[object]) -> None:
    with planned_for(TF32):
        data = plan_of(product("float32")).to_json()
    with pytest.raises(InvalidPlan, match="precisions: must be 3 of ieee, tf32, bf16"):
        Plan.from_json({**data, "precisions": wrong})


@pytest.mark.parametrize(("dtype", "shared"), [("float32", False), ("float16", True)])
def test_each_setting_has_its_own_trials(dtype: str, shared: bool) -> None:
    def build(b: GraphBuilder) -> tuple[str, ...]:
        x, w = (b.input(name, TensorType((4, 4), dtype)) for name in "xw")
        return b.emit("matmul", x, w, transpose_a=False, transpose_b=False)

    step, known = step_of(build), dict[tuple[str, ...], dict[Candidate, Outcome]]()
    with PlanDatabase.in_memory() as database:
        trials = StoredTrials(database, GPU, fresh=False)
        with planned_for(TF32):
            trials.keep(step, FRAMEWORK, TIMED)
        for precisions in (IEEE, TF32):
            with planned_for(precisions):
                known[precisions] = trials.known(step)
    assert known[TF32] == {FRAMEWORK: TIMED}
    assert known[IEEE] == (known[TF32] if shared else {})
    assert (trial_key(step, "sm90") == step.signature) is shared
    assert trial_key(step, "cpu") == step.signature
