"""What the worker does for whole plans, and its own parts."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.base.jsonable import from_json, to_json
from plantune.base.outcome import Rejected
from plantune.devices.device import CPU
from plantune.errors import (
    BuildError,
    CannotJudge,
    CaptureError,
    CudaError,
    IllegalCandidate,
    InvalidPlan,
    UnknownNetwork,
    WrongResult,
)
from plantune.graph.builder import GraphBuilder
from plantune.graph.graph import Graph
from plantune.graph.partition import one_by_one
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.tracing.arguments import Arguments
from plantune.graph.types import TensorType
from plantune.kernels.family import Candidate
from plantune.kernels.registry import all_families, candidates, resolve
from plantune.measure import roofline
from plantune.measure.limits import rejection
from plantune.measure.programs import draw_values
from plantune.measure.racing.race import Race
from plantune.measure.racing.routes import framework_routes
from plantune.measure.step_alone import TimedStep
from plantune.measure.subject import Raced
from plantune.measure.timing import Effort
from plantune.measure.worker.child import _answer
from plantune.measure.worker.client import Limits, Worker
from plantune.measure.worker.worker_process import _described
from plantune.models.registry import network
from plantune.plans.checked_plan import check_plan
from plantune.plans.guess import COMPILED, CPU_PREFERENCES, compose, framework_plan, hand_plan
from plantune.plans.plan import Plan
from plantune.plans.problem import Problem
from plantune.plans.workload import Workload
from plantune.runtime.module import TunedModule
from plantune.space.search_space import load_search_space

pytestmark = pytest.mark.usefixtures("copied_processes")
HERE = Path(__file__).parents[1]
EFFORT = Effort(budget_s=0.2, warm_up_s=0.01, retries=3)
NAME = "se_resnet9_fixup"


@pytest.fixture(scope="module")
def worker(copied_processes: None) -> Iterator[Worker]:
    families = {"PLANTUNE_FAMILIES": "faulty_kernels", "PYTHONPATH": str(HERE)}
    with Worker(threads=1, limits=Limits(build_s=60, run_s=30), environment=families) as worker:
        yield worker


def small(train: bool = False) -> Graph:
    """relu(conv(x)) and its gradients."""
    builder = GraphBuilder()
    x = builder.input("x", TensorType((2, 8, 16, 16)))
    w = builder.parameter("w", TensorType((8, 8, 3, 3)))
    geometry = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    graph = builder.build(builder.emit("relu", *builder.emit("conv2d", x, w, **geometry)))
    return differentiate(graph, ["w"]) if train else graph


def faulty_plan(plan: Plan, fault: str, place: int = -1) -> Plan:
    """The plan with one of its choices spoiled."""
    choices = list(plan.choices)
    spoiled = Candidate("faulty", Attrs(fault=fault))
    choices[place] = dataclasses.replace(choices[place], candidate=spoiled)
    return dataclasses.replace(plan, choices=tuple(choices))


@pytest.mark.parametrize("train", [False, True], ids=["infer", "train"])
def test_programs_are_timed_in_one_run(worker, space, train):
    graph = small(train)
    plans = [
        framework_plan(graph, space, network="small"),
        hand_plan(graph, space, network="small", without=COMPILED),
    ]
    found = worker.time_programs(graph, plans, EFFORT)
    assert len(found) == 2
    assert found[0].samples == found[1].samples
    assert all(5 < timing.median_us < 100_000 for timing in found)


def test_a_backward_pass_takes_its_time(worker, space):
    forward, both = (
        worker.time_programs(graph, [framework_plan(graph, space, network="small")], EFFORT)[0]
        for graph in (small(), small(train=True))
    )
    assert both.median_us > 1.3 * forward.median_us


def test_a_plan_that_does_not_build_is_rejected_and_others_timed(worker, space):
    graph = small()
    good = framework_plan(graph, space, network="small")
    bad = faulty_plan(good, "build_error")
    found = worker.time_programs(graph, [good, bad, good], EFFORT)
    assert found[1].stage == "build"
    assert found[0].samples == found[2].samples


def test_of_plans_for_which_there_is_no_time_the_first_is_timed(worker, space):
    graph = small()
    plan = framework_plan(graph, space, network="small")
    found = worker.time_programs(graph, [plan, plan], dataclasses.replace(EFFORT, until=0.0))
    assert found[0].samples == 1
    assert found[1] == Rejected("timeout", "there was no time left for it")


def test_a_plan_for_another_graph_is_raised(worker, space):
    plan = framework_plan(small(), space, network="small")
    problem = dataclasses.replace(plan.problem, graph="0" * 64)
    plan = dataclasses.replace(plan, problem=problem)
    with pytest.raises(InvalidPlan, match="for other layers"):
        worker.time_programs(small(), [plan], EFFORT)


def test_weights_come_from_the_seed():
    graph = small(train=True)
    first, again, other = (draw_values(graph, seed) for seed in (0, 0, 1))
    assert set(first) == {"x", "w", "d(relu)"}
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


@pytest.fixture(scope="module")
def planned() -> tuple[Problem, Plan]:
    """A plan for the network with one image, which differs from what the framework does."""
    spec = network(NAME)
    tuned = TunedModule(
        spec.build(3), Arguments((TensorType(spec.input_shape(1)),)), name=NAME, mode="infer"
    )
    preferences = [p for p in CPU_PREFERENCES if p.family in ("onednn_conv", "view", "framework")]
    graph = tuned.pool().graph
    plan = compose(graph, load_search_space("cpu"), network=NAME, preferences=preferences)
    return plan.problem, plan


def test_a_race_against_the_framework(worker, planned):
    problem, plan = planned
    routes = ("eager", "eager-channels-last", "torchscript")
    found = worker.race(Raced(problem), plan, routes, EFFORT)
    assert tuple(found.timings) == ("plantune", *routes)
    assert found.failures == {}
    assert len({timing.samples for timing in found.timings.values()}) == 1
    best = min(routes, key=lambda name: found.timings[name].median_us)
    assert found.best_route == best
    ratio = found.timings["plantune"].median_us / found.timings[best].median_us
    assert found.ratio.ratio == pytest.approx(ratio)
    assert found.ratio.low <= ratio <= found.ratio.high
    assert 0.1 < ratio < 10


def test_a_hasty_race_meets_one_of_the_frameworks_routes(worker, planned):
    problem, plan = planned
    hasty = dataclasses.replace(EFFORT, until=0.0)
    found = worker.race(Raced(problem), plan, ("eager", "torchscript"), hasty)
    assert tuple(found.timings) == ("plantune", "eager")
    assert found.failures == {"torchscript": "there was no time left for it"}
    assert found.ratio.low < found.ratio.ratio < found.ratio.high


def test_a_race_without_a_plan_or_without_routes(worker, planned):
    problem, plan = planned
    alone = worker.race(Raced(problem), None, ("eager",), EFFORT)
    assert (tuple(alone.timings), alone.best_route, alone.ratio) == (("eager",), "eager", None)
    unchallenged = worker.race(Raced(problem), plan, (), EFFORT)
    assert (tuple(unchallenged.timings), unchallenged.best_route) == (("plantune",), None)


def test_a_wrong_plan_does_not_race(worker, planned):
    problem, plan = planned
    steps = [i for i, choice in enumerate(plan.choices) if choice.candidate.family == "onednn_conv"]
    with pytest.raises(WrongResult, match="output 0 is off by") as caught:
        worker.race(Raced(problem), faulty_plan(plan, "wrong", steps[0]), ("eager",), EFFORT)
    assert caught.value.error > caught.value.bound > 0


def test_a_race_in_training(worker):
    found = worker.race(
        Raced(Workload(NAME, batch=2, mode="train").problem), None, ("eager", "torchscript"), EFFORT
    )
    infer = worker.race(Raced(Workload(NAME, batch=2).problem), None, ("eager",), EFFORT)
    assert found.failures == {}
    assert found.timings["eager"].median_us > 1.5 * infer.timings["eager"].median_us


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["infer", "train"])
def test_all_routes_race(mode):
    with Worker(threads=1) as worker:
        found = worker.race(
            Raced(Workload(NAME, batch=2, mode=mode).problem), None, effort=EFFORT, detailed=True
        )
    assert found.failures == {}
    assert tuple(found.timings) == framework_routes("cpu", mode)
    assert {name for name, route in found.details.items() if route.promise == "frozen"} == (
        {"torchscript", "torchscript-channels-last", "compile-frozen"} if mode == "infer" else set()
    )


def test_a_detailed_race_comes_back_whole(worker, planned):
    problem, plan = planned
    found = worker.race(Raced(problem), plan, ("eager",), EFFORT, detailed=True)
    assert tuple(found.timings) == ("plantune", "plantune-frozen", "eager")
    assert [route.promise for route in found.details.values()] == ["live", "frozen", "live"]
    assert found.in_turns == 64
    for route in found.details.values():
        assert set(route.queued) == set(route.latency) == {"same", "fresh"}
        assert route.build_s > 0
        assert (route.host_us, route.gpu_us) == (None, None)
    assert found.timings["eager"] == found.details["eager"].queued[found.images]
    assert from_json(Race, json.loads(json.dumps(to_json(found)))) == found


def test_what_cannot_race_is_said(worker):
    with pytest.raises(ValueError, match="no route is called"):
        worker.race(Raced(Workload(NAME, batch=1).problem), None, ("fastest",))
    unknown = dataclasses.replace(Workload(NAME, 1).problem, network="se_resnet9")
    with pytest.raises(UnknownNetwork, match="did you mean"):
        worker.race(Raced(unknown), None, ("eager",))


@pytest.mark.parametrize(
    ("error", "stage"),
    [
        (BuildError("log"), "build"),
        (WrongResult("what", 1.0, 0.1), "numerics"),
        (CannotJudge("the framework itself overflows"), "numerics"),
        (MemoryError(), "memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "memory"),
        (RuntimeError("std::bad_alloc"), "memory"),
        (OSError(12, "Cannot allocate memory"), "memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "memory"),
        (torch.AcceleratorError("CUDA error: misaligned address\nadvice"), "crash"),
        (CudaError("cuLaunchKernelEx failed with 700"), "crash"),
        (CaptureError("no graph can be captured"), "crash"),
        (RuntimeError("shapes do not match"), None),
        (KeyError("x"), None),
        (IllegalCandidate("no"), None),
    ],
)
def test_only_expected_failures_are_rejections(error, stage):
    found = rejection(error)
    assert found == (None if stage is None else Rejected(stage, found.reason))


@pytest.mark.parametrize("error", [math.inf, math.nan])
def test_an_error_that_no_number_tells_travels_too(error):
    """It ended the worker, as if the plan had crashed it."""
    told = json.loads(json.dumps(_described(WrongResult("what", error, 0.5)), allow_nan=False))
    with pytest.raises(WrongResult, match="what") as raised:
        _answer({"error": told})
    assert (raised.value.error, raised.value.bound) == (sys.float_info.max, 0.5)


def test_a_long_log_is_cut():
    assert len(rejection(BuildError("x" * 100_000)).reason) < 5000


def test_work_takes_time_and_a_view_none(step_of, space):
    product = step_of(
        lambda b: b.emit(
            "matmul",
            b.input("a", TensorType((256, 256))),
            b.parameter("b", TensorType((256, 256))),
            transpose_a=False,
            transpose_b=False,
        )
    )
    for candidate in candidates(product, space):
        assert roofline.least_us(resolve(product, candidate), CPU) > 1
    reshape = step_of(
        lambda b: b.emit("reshape", b.input("x", TensorType((1024, 1024))), shape=(1 << 20,))
    )
    framework = Candidate("framework", Attrs(layout="nchw"))
    assert roofline.least_us(resolve(reshape, Candidate("view", Attrs())), CPU) == 0
    assert roofline.least_us(resolve(reshape, framework), CPU) > 0


def test_a_peak_that_was_disturbed_is_measured_again_and_the_best_one_counts(monkeypatch):
    took_us = iter([80.0, 10.0, 50.0])
    monkeypatch.setattr(roofline, "_peaks", {})
    monkeypatch.setattr(roofline, "_stale", set())
    monkeypatch.setattr(roofline, "_best_us", lambda call, device: next(took_us))
    peaks = []
    for _ in range(3):
        peaks += [roofline.flops_per_us("float32", CPU) for _ in range(2)]
        roofline.look_again()
    low, high = peaks[0], peaks[2]
    assert high == 8 * low
    assert peaks == [low, low, high, high, high, high]


def test_kernels_are_timed_on_memory_as_a_program_gives_it(space):
    """Every candidate of every step of the small network runs again and again."""
    graph = small()
    plan = hand_plan(graph, space, network="small", without=COMPILED)
    for step in check_plan(plan, graph, space).partition:
        for candidate in candidates(step, space):
            if candidate.family in ("inductor", "winograd"):
                continue
            timed = TimedStep(resolve(step, candidate), space.arch)
            for _ in range(3):
                timed.launch()
            for name, type_ in step.inputs:
                assert timed.values[name].data_ptr() % 64 == 0
                assert timed.values[name].shape == type_.shape
                assert timed.values[name].any()


def test_families_of_the_user_are_found(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PLANTUNE_FAMILIES", "faulty_kernels")
    all_families.cache_clear()
    try:
        assert [*all_families()][-1] == "faulty"
        monkeypatch.setenv("PLANTUNE_FAMILIES", "")
        all_families.cache_clear()
        assert "faulty" not in all_families()
    finally:
        all_families.cache_clear()


def test_the_least_that_steps_can_take_is_measured(worker):
    steps = one_by_one(small())
    least = worker.rooflines(steps, "cpu")
    assert len(least) == len(steps)
    assert all(0 < us < 1e4 for us in least)
