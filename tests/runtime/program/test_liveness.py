"""When values are needed, and that every decision about it matters: see MUTATIONS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.graph.builder import GraphBuilder
from plantune.graph.layouts import aligned
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.types import TensorType
from plantune.kernels.family import Candidate
from plantune.plans.checked_plan import check_plan
from plantune.plans.guess import framework_plan
from plantune.plans.plan import Choice
from plantune.runtime.program import memory_plan as module
from plantune.runtime.program.memory_plan import Lifetime, _Uses, liveness, plan_memory
from plantune.runtime.program.schedule import make_schedule

IMAGE = TensorType((2, 3, 4, 4))
BYTES = IMAGE.size_bytes


def made_by(emit):
    builder = GraphBuilder()
    outputs = emit(builder, builder.input("x", IMAGE))
    return builder.build(outputs)


@pytest.fixture
def lives(space):
    """The liveness of a graph with its default plan, or with changed candidates by node."""

    def make(graph, **changed: Candidate):
        plan = framework_plan(graph, space, network="test")
        choices = [Choice(c.nodes, changed.get(c.nodes[0], c.candidate)) for c in plan.choices]
        plan = replace(plan, choices=tuple(choices))
        return liveness(make_schedule(check_plan(plan, graph, space)))

    return make


def test_a_chain(lives):
    def emit(b, x):
        (y,) = b.emit("relu", x)
        (z,) = b.emit("sigmoid", y)
        return b.emit("relu", z)

    live = lives(made_by(emit))
    assert live.buffers == (
        Lifetime("relu", BYTES, 0, 1),
        Lifetime("sigmoid", BYTES, 1, 2),
        Lifetime("relu_2", BYTES, 2, 2),
    )
    assert live.drops == ((), (), ())


def test_a_value_lives_to_its_last_reader(lives):
    def emit(b, x):
        (y,) = b.emit("relu", x)
        (z,) = b.emit("sigmoid", y)
        return b.emit("add", z, y)

    assert lives(made_by(emit)).buffers[0] == Lifetime("relu", BYTES, 0, 2)


def test_an_output_lives_to_the_end_of_its_pass(lives):
    def emit(b, x):
        (y,) = b.emit("relu", x)
        (z,) = b.emit("sigmoid", x)
        return (y, *b.emit("relu", z))

    assert lives(made_by(emit)).buffers[0] == Lifetime("relu", BYTES, 0, 2)


def test_a_view_keeps_what_it_views(lives):
    def emit(b, x):
        (y,) = b.emit("relu", x)
        (rows,) = b.emit("reshape", y, shape=(2, 48))
        (flat,) = b.emit("reshape", rows, shape=(96,))
        (other,) = b.emit("sigmoid", x)
        return (other, *b.emit("relu", flat))

    live = lives(made_by(emit))
    assert live.buffers[0] == Lifetime("relu", BYTES, 0, 4)
    assert [b.name for b in live.buffers] == ["relu", "sigmoid", "relu_2"]
    # The views themselves are let go behind their last reader.
    assert live.drops == ((), (), (), (), ("reshape", "reshape_2"))


def test_what_a_kernel_makes_itself_is_dropped_and_not_planned(lives):
    geometry = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}

    def emit(b, x):
        w = b.parameter("w", TensorType((3, 3, 1, 1)))
        (y,) = b.emit("conv2d", x, w, **geometry)
        (z,) = b.emit("relu", y)
        return b.emit("sigmoid", z)

    live = lives(made_by(emit))
    assert [b.name for b in live.buffers] == ["relu", "sigmoid"]
    assert live.drops == ((), ("conv2d",), ())


def test_a_conversion_lives_to_its_last_reader(lives):
    geometry = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
    nhwc = Candidate("framework", Attrs(layout="nhwc"))

    def emit(b, x):
        (y,) = b.emit("relu", x)
        made = []
        for name in ("v", "w"):
            w = b.parameter(name, TensorType((3, 3, 1, 1)))
            made += b.emit("conv2d", y, w, **geometry)
        return b.emit("add", *made)

    live = lives(made_by(emit), conv2d=nhwc, conv2d_2=nhwc)
    found = {b.name: (b.first, b.last) for b in live.buffers}
    assert found == {"relu": (0, 1), "relu in nhwc": (1, 2), "add": (3, 3)}


def test_a_workspace_lives_during_its_launch(space):
    def emit(b, x):
        (y,) = b.emit("relu", x)
        (z,) = b.emit("sigmoid", b.emit("affine", y, alpha=2.0, beta=1.0)[0])
        return b.emit("relu", z)

    graph = made_by(emit)
    plan = framework_plan(graph, space, network="test")
    framework = plan.choices[0].candidate
    choices = (
        Choice(("relu",), framework),
        Choice(("affine", "sigmoid"), framework),
        Choice(("relu_2",), framework),
    )
    plan = replace(plan, choices=choices)
    live = liveness(make_schedule(check_plan(plan, graph, space)))
    assert Lifetime("workspace of affine", aligned(BYTES), 1, 1) in live.buffers


def test_what_backward_reads_lives_to_its_last_reader(lives):
    """What outlasts the forward pass and not the backward pass is spent by it."""

    def emit(b, x):
        w = b.parameter("w", TensorType((1,)))
        (y,) = b.emit("mul", x, w)
        (z,) = b.emit("sigmoid", y)
        return b.emit("relu", z)

    graph = differentiate(made_by(emit))
    live = lives(graph)
    readers = {name: i for i, node in enumerate(graph.nodes) for name in node.inputs}
    found = {b.name: (b.first, b.last) for b in live.buffers}
    assert found["mul"] == (0, 1)
    assert found["sigmoid"] == (1, readers["sigmoid"])
    assert found["relu"] == (2, readers["relu"])
    assert live.spent == ("sigmoid", "relu")
    end = len(graph.nodes)
    assert all(found[name][1] == end for _, name in graph.gradients if name in found)


def test_a_backward_pass_takes_the_memory_that_it_leaves(space):
    """So that a deep network needs no more for gradients than it has kept."""

    def emit(b, x):
        (x,) = b.emit("mul", x, b.parameter("w", TensorType((1,))))
        for _ in range(8):
            (x,) = b.emit("sigmoid", x)
        return (x,)

    graph = differentiate(made_by(emit))
    plan = framework_plan(graph, space, network="test")
    live = liveness(make_schedule(check_plan(plan, graph, space)))
    kept = sum(aligned(b.size_bytes) for b in live.buffers if b.name in live.spent)
    assert len(live.spent) == 8
    assert plan_memory(live.buffers).size_bytes == kept + aligned(BYTES)


def test_gradients_of_outputs_have_a_place_from_the_backward_pass_on(space):
    """Before it they are not there, so that they need no memory of their own."""

    def emit(b, x):
        (x,) = b.emit("mul", x, b.parameter("w", TensorType((1,))))
        return b.emit("relu", b.emit("sigmoid", x)[0])

    graph = differentiate(made_by(emit))
    plan = framework_plan(graph, space, network="test")
    schedule = make_schedule(check_plan(plan, graph, space))
    ((seed, _),) = graph.output_gradients
    plain, live = liveness(schedule), liveness(schedule, seeds=True)
    readers = [i for i, node in enumerate(graph.nodes) if seed in node.inputs]
    assert [b for b in live.buffers if b not in plain.buffers] == [
        Lifetime(seed, BYTES, 3, max(readers))
    ]
    assert live.spent == plain.spent


# Every way in which a decision can be wrong, as a change of the code that takes it.


def use_too_short(self: _Uses, name: str, when: int) -> None:
    root = self.root(name)
    self.last[root] = max(self.last.get(root, when), when - 1)


def use_without_conversions(self: _Uses, name: str, when: int) -> None:
    if not name.endswith((" in nhwc", " in nchw")) or name not in self.last:
        root = self.root(name)
        self.last[root] = max(self.last.get(root, when), when)


def make_with_early_workspace(self: _Uses, name: str, size_bytes: int, when: range) -> None:
    original_make(self, name, size_bytes, range(1) if name.startswith("workspace of") else when)


def make_without_workspace(self: _Uses, name: str, size_bytes: int, when: range) -> None:
    original_make(self, name, 0 if name.startswith("workspace of") else size_bytes, when)


def launch_without_sources(self: _Uses, when, launch, schedule) -> None:
    """Reading for a conversion is no use of what is converted."""
    uses = dict(self.last)
    original_launch(self, when, launch, schedule)
    for conversion in launch.conversions:
        root = self.root(conversion.source)
        if root in uses and conversion.source not in dict(launch.step.inputs):
            self.last[root] = uses[root]


def without(*fields: str) -> Callable:
    """Liveness of a schedule whose graph does not say that these leave it."""

    def changed(schedule, branches=(), **more):
        graph = replace(schedule.graph, **dict.fromkeys(fields, ()))
        return original_liveness(replace(schedule, graph=graph), branches, **more)

    return changed


original_launch, original_liveness = _Uses.launch, module.liveness
original_make = _Uses.make


def at_their_own_place(schedule, branches=(), **more):
    """A branch holds nothing while others run beside it."""
    return original_liveness(schedule, **more)


def from_their_own_place(schedule, branches=(), **more):
    return original_liveness(schedule, [replace(b, fork=b.launch - 1) for b in branches], **more)


def to_their_own_place(schedule, branches=(), **more):
    return original_liveness(schedule, [replace(b, join=b.launch + 1) for b in branches], **more)


MUTATIONS = {
    "last use off by one": (_Uses, "use", use_too_short),
    "views are not counted": (_Uses, "root", lambda self, name: name),
    "saved values are not spared": (_Uses, "cross", lambda self, turn, end: ()),
    "outputs are freed early": (module, "liveness", without("outputs")),
    "updates are freed early": (module, "liveness", without("updates")),
    "gradients are freed early": (module, "liveness", without("gradients")),
    "conversions are freed early": (_Uses, "use", use_without_conversions),
    "sources of conversions are freed early": (_Uses, "launch", launch_without_sources),
    "a workspace is there at another time": (_Uses, "make", make_with_early_workspace),
    "a workspace has no size": (_Uses, "make", make_without_workspace),
}


@pytest.fixture
def fails(space, poisoned, why_wrong):
    """Whether a run with a second pass and a second backward is wrong or breaks."""

    def run(case, lanes=None) -> bool:
        program = poisoned(case.graph, case.plan, space, lanes)
        try:
            if why_wrong(case, case.run(program)) or why_wrong(case, case.run(program)):
                return True
            if case.graph.backward_from is None:
                return False
            seeds = [case.output_gradients[name] for name, _ in case.graph.output_gradients]
            first, second = program.backward(*seeds), program.backward(*seeds)
        except (KeyError, RuntimeError):
            return True
        return not all(torch.equal(first[name], second[name]) for name in first)

    return run


CASES = [(seed, mode) for seed in range(25) for mode in ("train", "eval", "infer")]


@pytest.mark.parametrize("name", MUTATIONS)
def test_breaking_a_decision_breaks_a_program(monkeypatch, case_of, fails, name):
    monkeypatch.setattr(*MUTATIONS[name])
    assert any(fails(case_of(seed, mode)) for seed, mode in CASES)


BRANCH_MUTATIONS = {
    "branches hold nothing": at_their_own_place,
    "branches start too late": from_their_own_place,
    "branches end too early": to_their_own_place,
}


@pytest.mark.parametrize("name", BRANCH_MUTATIONS)
def test_breaking_the_life_of_branches_breaks_a_program(
    monkeypatch, case_of, fails, all_lanes, name
):
    monkeypatch.setattr(module, "liveness", BRANCH_MUTATIONS[name])
    assert any(fails(case_of(seed, mode), lanes) for lanes in all_lanes for seed, mode in CASES)


def test_without_a_mutation_no_program_breaks(case_of, fails):
    assert not any(fails(case_of(seed, mode)) for seed, mode in CASES[:15])
