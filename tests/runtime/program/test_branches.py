"""Which launches run beside others."""

from __future__ import annotations

import pytest

from plantune.graph.builder import GraphBuilder
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.types import TensorType
from plantune.plans.checked_plan import check_plan
from plantune.plans.guess import framework_plan
from plantune.runtime.program import branches as module
from plantune.runtime.program.branches import REACH, Branch, branches_of
from plantune.runtime.program.memory_plan import Lifetime, liveness, passes
from plantune.runtime.program.schedule import ScheduledStep, make_schedule

IMAGE = TensorType((2, 3, 4, 4))
BYTES = IMAGE.size_bytes
GEOMETRY = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}


@pytest.fixture
def scheduled(space):
    """The schedule of the default plan of a graph that `emit` makes of an image."""

    def make(emit, differentiated=False):
        builder = GraphBuilder()
        outputs = emit(builder, builder.input("x", IMAGE))
        graph = builder.build(outputs)
        if differentiated:
            graph = differentiate(graph, ["x", *(name for name, _ in graph.parameters)])
        plan = framework_plan(graph, space, network="test")
        return make_schedule(check_plan(plan, graph, space))

    return make


def chain(b, x, *ops):
    for op in ops:
        (x,) = b.emit(op, x)
    return x


def residual(b, x):
    """Two ops in a row, and beside them one whose result only the sum needs."""
    start = chain(b, x, "relu")
    long = chain(b, start, "sigmoid", "relu")
    return b.emit("add", long, chain(b, start, "sigmoid"))


def test_what_is_read_later_runs_beside_what_is_read_at_once(scheduled):
    schedule = scheduled(residual)
    names = [launch.step.name for launch in schedule.launches]
    assert names == ["relu", "sigmoid", "relu_2", "sigmoid_2", "add"]
    assert branches_of(schedule) == (Branch(3, 0, 4),)


def test_it_may_come_before_the_others(scheduled):
    def emit(b, x):
        start = chain(b, x, "relu")
        short = chain(b, start, "sigmoid")
        return b.emit("add", chain(b, start, "sigmoid", "relu"), short)

    assert branches_of(scheduled(emit)) == (Branch(1, 0, 4),)


def test_a_chain_has_none(scheduled):
    assert branches_of(scheduled(lambda b, x: (chain(b, x, "relu", "sigmoid", "relu"),))) == ()


def test_of_two_beside_each_other_the_smaller_one_leaves_the_line(scheduled):
    def emit(b, x):
        start = chain(b, x, "relu")
        (large,) = b.emit("conv2d", start, b.parameter("w", TensorType((3, 3, 1, 1))), **GEOMETRY)
        return b.emit("add", chain(b, start, "sigmoid"), large)

    schedule = scheduled(emit)
    (branch,) = branches_of(schedule)
    assert schedule.launches[branch.launch].step.name == "sigmoid"


def test_what_waits_for_nothing_forks_at_once_and_a_result_joins_at_the_end(scheduled):
    def emit(b, x):
        alone = chain(b, x, "sigmoid")
        return (alone, chain(b, x, "relu", "sigmoid", "relu"))

    schedule = scheduled(emit)
    assert schedule.launches[0].step.name == "sigmoid"
    assert branches_of(schedule) == (Branch(0, -1, 4),)


def test_it_reaches_no_further_than_it_may(scheduled):
    def emit(b, x):
        start = chain(b, x, "relu")
        long = chain(b, start, *["sigmoid", "relu"] * REACH)
        return b.emit("add", long, chain(b, start, "sigmoid"))

    (branch,) = branches_of(scheduled(emit))
    assert (branch.fork, branch.join) == (branch.launch - 1 - REACH, branch.launch + 1)


def test_no_branch_reads_of_another(scheduled):
    """Of two in a row that could both leave the line, one does."""

    def emit(b, x):
        start = chain(b, x, "relu")
        long = chain(b, start, "sigmoid", "relu", "sigmoid")
        return b.emit("add", long, chain(b, start, "relu", "relu"))

    schedule = scheduled(emit)
    names = [launch.step.name for launch in schedule.launches]
    assert names[4:6] == ["relu_3", "relu_4"]
    branches = branches_of(schedule)
    assert Branch(4, 0, 5) in branches
    assert 5 not in [branch.launch for branch in branches]


def test_a_view_is_not_work_to_run_beside(scheduled):
    def emit(b, x):
        start = chain(b, x, "relu")
        (rows,) = b.emit("reshape", start, shape=(96,))
        (other,) = b.emit("reshape", chain(b, start, "sigmoid"), shape=(96,))
        return b.emit("add", rows, other)

    assert branches_of(scheduled(emit)) == ()


def test_what_a_kernel_makes_in_memory_of_its_own_stays_in_line(scheduled):
    """It would be freed on another stream than that of its readers."""

    def emit(b, x):
        start = chain(b, x, "relu")
        (own,) = b.emit("conv2d", start, b.parameter("w", TensorType((3, 3, 1, 1))), **GEOMETRY)
        return b.emit("add", chain(b, start, "sigmoid", "relu"), own)

    schedule = scheduled(emit)
    adopting = [place for place, launch in enumerate(schedule.launches) if launch.adopts]
    assert adopting
    assert not {branch.launch for branch in branches_of(schedule)} & {*adopting}


def test_a_conversion_counts_as_what_its_launch_makes(case_of, space):
    """Whoever reads it later waits for the branch that it is made in."""
    made = 0
    for case in (case_of(seed, mode) for seed in range(25) for mode in ("train", "eval", "infer")):
        schedule = make_schedule(check_plan(case.plan, case.graph, space))
        launches = passes(schedule)
        for branch in branches_of(schedule):
            launch = launches[branch.launch]
            made += bool(launch.conversions)
            for place in branch.beside:
                assert place == branch.launch or not launches[place].reads & launch.writes
                assert place == branch.launch or not launches[place].writes & launch.reads
    assert made


def test_a_branch_stays_in_its_pass(scheduled):
    def emit(b, x):
        """The gradient of the factor is a result, for which nothing waits."""
        return b.emit("mul", *residual(b, x), b.parameter("w", TensorType((1,))))

    schedule = scheduled(emit, differentiated=True)
    turn = len(schedule.phase("forward"))
    branches = branches_of(schedule)
    assert any(branch.launch < turn for branch in branches)
    assert any(branch.launch >= turn for branch in branches)
    for branch in branches:
        forward = branch.launch < turn
        assert (branch.join <= turn) if forward else (branch.fork >= turn - 1)


def test_a_branch_holds_what_it_touches_as_long_as_it_may_run(scheduled):
    schedule = scheduled(residual)
    branches = branches_of(schedule)
    assert liveness(schedule).buffers[:4] == (
        Lifetime("relu", BYTES, 0, 3),
        Lifetime("sigmoid", BYTES, 1, 2),
        Lifetime("relu_2", BYTES, 2, 4),
        Lifetime("sigmoid_2", BYTES, 3, 4),
    )
    assert liveness(schedule, branches).buffers[3] == Lifetime("sigmoid_2", BYTES, 1, 4)
    early = (Branch(1, 0, 4),)
    assert liveness(schedule, early).buffers[1] == Lifetime("sigmoid", BYTES, 1, 3)


class TestRest:
    """The second half of a launch that stays in line."""

    @pytest.fixture(autouse=True)
    def halves(self, monkeypatch):
        """As if a sigmoid were made in a second half, with a workspace."""
        made = property(lambda self: frozenset(self.writes if self.step.name == "sigmoid" else ()))
        monkeypatch.setattr(ScheduledStep, "rest", made)
        size = property(lambda self: BYTES if self.rest else 0)
        monkeypatch.setattr(ScheduledStep, "workspace_bytes", size)

    @pytest.fixture
    def in_line(self, monkeypatch):
        """No launch leaves the line as a whole."""
        stays = lambda edges, place: Branch(place, place - 1, place + 1)  # noqa: E731
        monkeypatch.setattr(module, "_span", stays)

    @pytest.fixture
    def chained(self, scheduled):
        def emit(b, x):
            return (*b.emit("sigmoid", x), chain(b, x, *["relu"] * (REACH + 2)))

        return scheduled(emit)

    def test_it_reaches_no_further_than_a_branch(self, chained, in_line):
        assert branches_of(chained) == (Branch(0, 0, 1 + REACH, rest=True),)

    def test_it_joins_where_what_it_makes_is_read(self, scheduled, in_line):
        def emit(b, x):
            return b.emit("add", chain(b, x, "sigmoid"), chain(b, x, "relu", "relu"))

        assert branches_of(scheduled(emit)) == (Branch(0, 0, 3, rest=True),)

    def test_what_is_read_at_once_is_no_branch(self, scheduled, in_line):
        assert branches_of(scheduled(lambda b, x: (chain(b, x, "sigmoid", "relu"),))) == ()

    def test_no_branch_reads_of_it(self, scheduled):
        def emit(b, x):
            start = chain(b, x, "sigmoid")
            (other,) = b.emit("reshape", chain(b, start, "relu"), shape=IMAGE.shape)
            return b.emit("add", chain(b, x, "relu", "relu", "relu"), other)

        for branch in branches_of(scheduled(emit)):
            assert not branch.rest

    def test_its_workspace_and_what_it_touches_stay_as_long(self, chained):
        rest = Branch(0, 0, 3, rest=True)
        found = {b.name: (b.first, b.last) for b in liveness(chained, [rest]).buffers}
        alone = {b.name: (b.first, b.last) for b in liveness(chained).buffers}
        workspace = "workspace of sigmoid"
        assert (found[workspace], alone[workspace]) == ((0, 2), (0, 0))
        assert found | {workspace: (0, 0)} == alone
