"""Branches run on streams of their own, between a fork and a join."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from plantune.devices.machine import arch_of
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.models.se_resnet9 import SEResNet9Fixup
from plantune.plans.checked_plan import check_plan
from plantune.plans.guess import hand_plan
from plantune.runtime.program import branches as module
from plantune.runtime.program.branches import Branch, Lanes, branches_of
from plantune.runtime.program.program import Program
from plantune.runtime.program.schedule import make_schedule
from plantune.space.search_space import load_search_space

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
CYCLES = 20_000_000  # some milliseconds


class Told:
    """A lane that tells what is done with it."""

    said: list[str]

    def __init__(self, branch, device):
        self.branch = branch

    def fork(self):
        self.said.append(f"fork {self.branch.launch}")

    def join(self):
        self.said.append(f"join {self.branch.launch}")

    def around(self, calls):
        def call():
            self.said.append(f"lane {self.branch.launch}")
            for each in calls:
                each()

        return call


@pytest.fixture
def told(monkeypatch):
    """What happens in passes of six launches each, in order, as on a GPU."""
    monkeypatch.setattr(module, "_Lane", Told)
    Told.said = []

    def run(*branches, places=range(6), device=GPU, marked=()):
        calls = [[lambda i=i: Told.said.append(str(i))] for i in range(12)]
        lanes = Lanes(branches, device)
        rests = {i: lambda i=i: Told.said.append(f"rest of {i}") for i in lanes.halved}
        Told.said.clear()
        marks = {place: lambda i=place: Told.said.append(f"mark {i}") for place in marked}
        for call in lanes.ordered(calls, places, rests, marks):
            call()
        return " ".join(Told.said)

    return run


def test_without_branches_the_order_is_that_of_the_launches(told):
    assert told() == "0 1 2 3 4 5"


def test_a_branch_starts_after_its_fork_and_ends_before_its_join(told):
    assert told(Branch(3, 0, 5)) == "0 fork 3 1 2 lane 3 3 4 join 3 5"


def test_the_ends_of_a_pass(told):
    assert told(Branch(1, -1, 6)) == "fork 1 0 lane 1 1 2 3 4 5 join 1"


def test_what_forks_where_another_joins_waits_for_it(told):
    """It may write where the other one read."""
    assert told(Branch(4, 2, 5), Branch(1, 0, 3)) == (
        "0 fork 1 lane 1 1 2 join 1 fork 4 3 lane 4 4 join 4 5"
    )


def test_each_pass_has_its_own(told):
    branches = Branch(2, 0, 6), Branch(7, 5, 9)
    assert told(*branches) == "0 fork 2 1 lane 2 2 3 4 5 join 2"
    assert told(*branches, places=range(6, 12)) == "fork 7 6 lane 7 7 8 join 7 9 10 11"


def test_the_second_half_of_a_launch_forks_after_the_first(told):
    assert told(Branch(1, 1, 4, rest=True), Branch(3, 1, 5)) == (
        "0 1 fork 1 fork 3 2 lane 1 rest of 1 lane 3 3 join 1 4 join 3 5"
    )
    assert told(Branch(4, 4, 6, rest=True)).endswith("4 fork 4 5 lane 4 rest of 4 join 4")


def test_marks_come_before_their_launch_after_what_is_joined_there(told):
    assert told(Branch(3, 0, 5), marked=(1, 5, 6)) == (
        "0 mark 1 fork 3 1 2 lane 3 3 4 join 3 mark 5 5 mark 6"
    )


def test_on_the_cpu_branches_run_in_their_turn(told):
    assert told(Branch(1, 1, 4, rest=True), device=CPU) == "0 1 2 3 4 5"
    assert told(Branch(3, 0, 5), device=CPU) == "0 1 2 3 4 5"


def slow(call):
    """Nothing that waits for it is ready by chance."""

    def both():
        torch.cuda._sleep(CYCLES)
        call()

    return both


@pytest.mark.gpu
class TestOrder:
    """y = x + 1; w = 2 y, and beside it z = 4 y; v = 3 y; then their sum, and z is overwritten."""

    BRANCH = Branch(2, 0, 4)

    @pytest.fixture
    def pass_of(self):
        x, y, z, w, v, out = (torch.zeros(1024, device=GPU) for _ in range(6))
        calls = [
            [slow(lambda: torch.add(x, 1, out=y))],
            [slow(lambda: torch.mul(y, 2, out=w))],
            [slow(lambda: torch.mul(y, 4, out=z))],
            [lambda: torch.mul(y, 3, out=v)],
            [lambda: torch.add(z, w, out=out), lambda: out.add_(v)],
            [lambda: z.fill_(torch.nan)],
        ]

        def make(*branches):
            order = Lanes(branches, GPU).ordered(calls, range(6))
            return lambda: [call() for call in order]

        self.x, self.out = x, out
        return make

    def is_right(self, call):
        self.x.add_(1)
        call()
        return torch.equal(self.out, 9 * (self.x + 1))

    def captured(self, call):
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def test_eager_and_captured_passes(self, pass_of):
        eager = pass_of(self.BRANCH)
        assert all(self.is_right(eager) for _ in range(3))
        replay = self.captured(eager)
        assert all(self.is_right(call) for call in (replay, eager, replay, replay, eager))

    def test_it_takes_no_time_beside_what_takes_longer(self, pass_of):
        """By the GPU's clock, at best of some runs: a busy host may come late to one of them."""

        def milliseconds(call):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            before.record()
            call()
            after.record()
            after.synchronize()
            return before.elapsed_time(after)

        ways = [self.captured(pass_of(*branches)) for branches in ((), (self.BRANCH,))]
        line, beside = (min(milliseconds(call) for _ in range(5)) for call in ways)
        assert beside < 0.8 * line  # two slow launches after each other instead of three


@pytest.mark.gpu
def test_streams_are_plantunes_alone_and_serve_again():
    torch.zeros(1, device=GPU)
    lanes = Lanes([Branch(2, 0, 4), Branch(5, 3, 6)], GPU)
    own = {lane._stream.cuda_stream for lane in lanes._lanes}
    assert len(own) == 2
    assert own.isdisjoint(torch.cuda.Stream(GPU).cuda_stream for _ in range(64))
    del lanes
    gc.collect()
    again = Lanes([Branch(2, 0, 4), Branch(5, 3, 6)], GPU)
    assert {lane._stream.cuda_stream for lane in again._lanes} == own


class Passes:
    """Programs of one network, and what they make of images, with the weights as they are."""

    def __init__(self, batch, mode):
        torch.manual_seed(0)
        network = SEResNet9Fixup(3).to(GPU, torch.float16).train(mode == "train")
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.normal_(std=parameter[0].numel() ** -0.5).add_(parameter.dim() == 1)
        graph = extract(network, TensorType((batch, 3, 64, 64), "float16"))
        if mode == "train":
            graph = differentiate(graph, [name for name, _ in graph.parameters])
        self.graph = graph
        self.state = {**dict(network.named_parameters()), **dict(network.named_buffers())}
        self.space = load_search_space(arch_of(GPU))
        self.plan = hand_plan(graph, self.space, network="test")
        self.images = [
            torch.randn(batch, 3, 64, 64, device=GPU, dtype=torch.float16) for _ in range(3)
        ]

    @torch.no_grad()
    def results(self, branches, captured):
        plan = replace(self.plan, branches=branches)
        program = Program(check_plan(plan, self.graph, self.space), GPU)
        program.refresh(self.state)
        for name, type_ in (*self.graph.inputs, *self.graph.output_gradients):
            program.values[name] = torch.full(type_.shape, 0.125, dtype=torch.float16, device=GPU)

        def run():
            program.run_forward()
            program.run_backward()

        stream = torch.cuda.Stream(GPU)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.synchronize()
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                run()
            run = graph.replay
        found = []
        for image in self.images * 5:
            program.values[self.graph.inputs[0][0]].copy_(image)
            run()
            found.append({n: program.values[n].clone() for n in sorted(self.graph.results)})
        return found


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [3, 128])
@pytest.mark.parametrize("mode", ["infer", "train"])
def test_a_network_with_branches_gives_the_same_bits(mode, batch):
    """Eagerly and captured, on other images in each pass, the passes close behind each other."""
    passes = Passes(batch, mode)
    checked = check_plan(passes.plan, passes.graph, passes.space)
    assert branches_of(make_schedule(checked))
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        wanted = passes.results(branches=False, captured=False)
        for captured in (False, True):
            for ours, theirs in zip(passes.results(True, captured), wanted, strict=True):
                for name, result in theirs.items():
                    assert torch.equal(ours[name], result), (captured, name)
    assert not torch.equal(*(wanted[i][passes.graph.outputs[0]] for i in (0, 1)))
