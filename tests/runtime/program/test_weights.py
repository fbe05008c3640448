"""What a pass computes from weights alone, here by torch: all of it, in order."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from plantune.base.canonical import Attrs
from plantune.graph.builder import GraphBuilder
from plantune.graph.graph import Graph
from plantune.graph.step import Step, make_step
from plantune.graph.types import TensorType
from plantune.kernels.family import Candidate, Frame
from plantune.kernels.patterns.channel_affine import ChannelScales, channel_affine_of
from plantune.kernels.registry import resolve
from plantune.kernels.weights.constants import Constant, conv_weight, floats, in_rows
from plantune.runtime.program import weights as weights_module
from plantune.runtime.program.schedule import Schedule, ScheduledStep
from plantune.runtime.program.weights import Weights
from plantune.space.arch import load_arch

CPU, ARCH = torch.device("cpu"), load_arch("sm90")
GROUPS = dict[str, Sequence[Constant]]


@dataclass
class Network:
    """A graph that is built node by node; each group of nodes becomes a step."""

    builder: GraphBuilder = field(default_factory=GraphBuilder)
    groups: list[list[str]] = field(default_factory=list)

    def x(self, *shape: int) -> str:
        return self.builder.input(f"x{len(self.builder.inputs)}", TensorType(shape, "float32"))

    def w(self, *shape: int) -> str:
        name = f"w{len(self.builder.parameters)}"
        return self.builder.parameter(name, TensorType(shape, "float32"))

    def __call__(self, op: str, *inputs: str, **attrs: object) -> str:
        """A node in a step of its own."""
        name = self.builder.emit(op, *inputs, **attrs)[0]
        self.groups.append([name])
        return name

    def joined(self, op: str, *inputs: str, **attrs: object) -> str:
        """A node in the last step."""
        name = self.builder.emit(op, *inputs, **attrs)[0]
        self.groups[-1].append(name)
        return name


class Run:
    """Weights of a network on the CPU, and what the framework computes beside them."""

    def __init__(
        self,
        network: Network,
        outputs: Iterable[str],
        constants: Callable[[Step, Frame], Sequence[Constant]] = lambda step, frame: (),
    ) -> None:
        self.graph: Graph = network.builder.build(tuple(outputs))
        steps = [make_step(self.graph, group) for group in network.groups]
        candidate = Candidate("framework", Attrs())
        self.launches = tuple(ScheduledStep(resolve(step, candidate)) for step in steps)
        # As a program has it: memory for all that a step makes.
        self.values: dict[str, Tensor] = {
            name: torch.full(type_.shape, torch.nan)
            for launch in self.launches
            for name, type_ in launch.step.outputs
        }
        self.memory = {name: weakref.ref(tensor) for name, tensor in self.values.items()}
        schedule = Schedule(self.graph, self.launches, {})
        self.weights = Weights(self.graph, self.values, ARCH, CPU)
        self.others = self.weights.others(schedule)
        frame = Frame(self.values)
        passes = [launch for launch in self.launches if launch.step.phase == "forward"]
        self.constants: GROUPS = {
            launch.step.name: tuple(constants(launch.step, frame))
            for launch in (*self.others, *passes)
        }
        self.weights.bind((*self.others, *passes), self.constants)
        self.state = {n: torch.rand(t.shape) + 0.5 for n, t in self.graph.parameters}

    def step(self, name: str) -> Callable[[], None]:
        """The framework's part."""
        (launch,) = [launch for launch in self.others if launch.step.name == name]

        def call() -> None:
            made = launch.step.evaluate(self.values)
            for output, _ in launch.step.outputs:
                self.values[output].copy_(made[output])

        return call

    def compute(self) -> None:
        self.weights.place(self.state)
        self.weights.compute(0, [self.step(launch.step.name) for launch in self.others])

    def right(self) -> dict[str, Tensor]:
        """Every constant in float64."""
        known = {name: tensor.double() for name, tensor in self.state.items()}
        for node in self.graph.nodes:
            if self.graph.constants.issuperset(node.outputs):
                made = node.evaluate([known[name] for name in node.inputs], torch.float64)
                known.update(zip(node.outputs, made, strict=True))
        return known

    def check(self, constant: Constant, order: Callable[[Tensor], Tensor] = torch.flatten) -> None:
        right = order(self.right()[constant.name])
        torch.testing.assert_close(constant.tensor.double(), right, rtol=1e-5, atol=1e-6)

    @property
    def all_constants(self) -> list[Constant]:
        return [constant for group in self.constants.values() for constant in group]


def twice(run: Run) -> Iterable[None]:
    """Passes with other weights, by a write in place and in other memory."""
    run.compute()
    yield
    for tensor in run.state.values():
        tensor.mul_(1.25)
    run.compute()
    yield
    run.state = {name: tensor.clone() + 0.25 for name, tensor in run.state.items()}
    run.compute()
    yield


def normalised() -> tuple[Network, str]:
    """A convolution whose scale and shift follow from a batch norm."""
    b = Network()
    scale = b("mul", b.w(8), b("rsqrt", b.w(8), eps=1e-5))
    x = b("conv2d", b.x(1, 4, 5, 5), b.w(8, 4, 1, 1), **PLAIN)
    return b, b("mul_channel", x, scale, axis=1)


PLAIN = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}


def as_vectors(step: Step, frame: Frame) -> Sequence[Constant]:
    return [
        floats(step.types[name].numel).of(name, frame)
        for name in sorted(step.constants)
        if len(step.types[name].shape) == 1
    ]


def test_a_kernel_s_vectors_are_derived_in_each_pass():
    network, output = normalised()
    run = Run(network, [output], as_vectors)
    assert run.others == ()
    (scale,) = [c for c in run.all_constants if c.name == "mul"]
    for _ in twice(run):
        run.check(scale)
    # Nobody reads it as it is.
    assert "mul" not in run.values
    assert run.memory["mul"]() is None


def as_it_lies(step: Step, frame: Frame) -> Sequence[Constant]:
    return [in_rows(step.types[name]).of(name, frame) for name in sorted(step.constants)]


def test_a_derived_value_that_a_kernel_would_read_in_place_is_filled():
    """A program has memory for it, as for all that steps make; nothing is ever in it."""
    network, output = normalised()
    run = Run(network, [output], as_it_lies)
    (scale,) = [c for c in run.all_constants if c.name == "mul"]
    for _ in twice(run):
        run.check(scale)


def test_a_derived_value_that_the_framework_reads_is_there():
    network, output = normalised()
    run = Run(network, [output])
    memory = []
    for _ in twice(run):
        torch.testing.assert_close(run.values["mul"].double(), run.right()["mul"])
        memory.append(run.values["mul"].data_ptr())
    assert len(set(memory)) == 1
    assert "rsqrt" not in run.values


def test_a_result_that_follows_from_weights_alone_is_there():
    b = Network()
    left = b("relu", b.w(5))
    run = Run(b, [left, b("relu", b.x(5))])
    for _ in twice(run):
        torch.testing.assert_close(run.values[left].double(), run.right()[left])


def test_one_and_the_same_value_serves_both_ways():
    """One step reads it as it is, another one in an order of its own."""
    b = Network()
    scaled = b("mul", b.w(8, 4, 3, 3), b.w(1))
    x = b.x(1, 4, 5, 5)
    first, second = (b("conv2d", x, scaled, **PLAIN) for _ in range(2))

    def constants(step: Step, frame: Frame) -> Sequence[Constant]:
        return [conv_weight(step.types[scaled]).of(scaled, frame)] if step.name == second else []

    run = Run(b, [first, second], constants)
    (constant,) = run.all_constants
    for _ in twice(run):
        run.check(constant, lambda w: w.permute(0, 2, 3, 1))
        torch.testing.assert_close(run.values[scaled].double(), run.right()[scaled])


def unlike(b: Network) -> str:
    """What is no expression: a sum over a filter, by which it is divided."""
    w = b.w(6, 4, 3, 3)
    total = b("mean", b("mul", w, b.w(1)), dims=(2, 3), keepdim=True)
    return b("sub", w, total)


def test_what_is_not_an_expression_is_left_to_the_framework_in_order():
    """First what it reads of derived values, at last what kernels read of its results."""
    b = Network()
    filter_ = unlike(b)
    y = b("conv2d", b.x(1, 4, 5, 5), filter_, **PLAIN)

    def constants(step: Step, frame: Frame) -> Sequence[Constant]:
        return [conv_weight(step.types[filter_]).of(filter_, frame)] if step.name == y else []

    run = Run(b, [y], constants)
    assert [launch.step.ops for launch in run.others] == [("mean",), ("sub",)]
    (constant,) = run.all_constants
    for _ in twice(run):
        run.check(constant, lambda w: w.permute(0, 2, 3, 1))


def test_a_step_of_the_framework_keeps_what_it_makes_on_the_way():
    """One of its results is an expression, another one is not."""
    b = Network()
    scaled = b("mul", b.w(6, 4, 3, 3), b.w(1))
    total = b.joined("mean", scaled, dims=(2, 3), keepdim=True)
    y = b("conv2d", b.x(1, 4, 5, 5), b("sub", scaled, total), **PLAIN)
    run = Run(b, [y])
    for _ in twice(run):
        for name in (scaled, total):
            torch.testing.assert_close(run.values[name].double(), run.right()[name])


def run_with_scales(b: Network, y: str) -> tuple[Run, list[ChannelScales]]:
    """A run whose step keeps the scales of four channels, and a list of them once it is built."""
    tables: list[ChannelScales] = []

    def constants(step: Step, frame: Frame) -> Sequence[Constant]:
        if step.phase != "forward":
            return ()
        tables.append(ChannelScales(channel_affine_of(step), 4, frame))
        return tables[0].constants

    return Run(b, [y], constants), tables


@pytest.mark.parametrize("derived_first", [True, False])
def test_scales_that_torch_composes_come_after_what_they_read(derived_first):
    b = Network()
    plain, made = b.w(4, 1, 1), b("relu", b.w(4, 1, 1))
    one, other = (made, plain) if derived_first else (plain, made)
    y = b.joined("add", b("mul", b.x(2, 4, 5, 5), one), other)
    run, tables = run_with_scales(b, y)
    for _ in twice(run):
        right = torch.stack([run.right()[one].flatten(), run.right()[other].flatten()], dim=1)
        torch.testing.assert_close(tables[0].tensor.double(), right)


def test_scales_that_follow_from_the_framework_s_values_come_last():
    b = Network()
    plain = b.w(4, 1, 1)
    made = b("mean", b.w(4, 3, 3), dims=(1, 2), keepdim=True)
    y = b.joined("add", b("mul", b.x(2, 4, 5, 5), plain), made)
    run, tables = run_with_scales(b, y)
    for _ in twice(run):
        right = torch.stack([run.right()[plain].flatten(), run.right()[made].flatten()], dim=1)
        torch.testing.assert_close(tables[0].tensor.double(), right)


def test_weights_are_the_caller_s_own():
    b = Network()
    y = b("mul", b.x(4), b.w(4))
    run = Run(b, [y])
    for _ in twice(run):
        assert run.values["w0"].data_ptr() == run.state["w0"].data_ptr()
        assert not run.values["w0"].requires_grad
    assert run.weights.launches == 0


class Noted:
    """In the place of a stream beside."""

    def __init__(self, device: torch.device) -> None:
        self.forks = self.joins = 0
        self.runs = False

    @contextmanager
    def forked(self) -> Iterator[int]:
        self.forks += 1
        self.runs = True
        yield 0

    def join(self) -> None:
        self.joins += 1

    def end(self) -> None:
        self.runs = False


def first_of(run: Run) -> ScheduledStep:
    return next(launch for launch in run.launches if launch.step.phase == "forward")


@pytest.mark.parametrize(
    ("first", "beside"), [("relu", True), ("its own weight", True), ("a derived value", False)]
)
def test_what_the_first_launch_needs_is_made_before_it(monkeypatch, first, beside):
    monkeypatch.setattr(weights_module, "Beside", Noted)
    b = Network()
    derived, x = b("relu", b.w(5)), b.x(5)
    reads = {"its own weight": b.w(5), "a derived value": derived}
    y = b("mul", x, reads[first]) if first in reads else b("relu", x)
    z = b("add", y, derived)
    run = Run(b, [z], lambda step, frame: as_it_lies(step, frame) if step.name == z else ())
    launch = first_of(run)
    run.weights.go_beside(launch, run.constants[launch.step.name])
    run.compute()
    assert (run.weights._beside is not None) == beside
    assert not beside or run.weights._beside.forks == 1
    for constant in run.all_constants:
        run.check(constant)


def test_what_has_to_be_packed_for_the_first_launch_is_made_before_it(monkeypatch):
    monkeypatch.setattr(weights_module, "Beside", Noted)
    b = Network()
    y = b("mul", b.x(6), b.w(6))
    run = Run(b, [y], as_it_lies)
    run.weights.go_beside(first_of(run), run.constants[y])
    run.compute()
    run.state = {"w0": torch.randn(12)[::2]}
    run.compute()
    assert run.weights._beside.forks == 0
    run.check(run.all_constants[0])


def test_only_launches_that_read_what_is_made_beside_wait_for_it(monkeypatch):
    monkeypatch.setattr(weights_module, "Beside", Noted)
    b = Network()
    derived = b("relu", b.w(6))
    first = b("relu", b.x(6))
    plain = b("mul", first, b.w(6))
    last = b("add", plain, derived)
    run = Run(b, [last], lambda step, frame: as_it_lies(step, frame) if step.name == plain else ())
    launches = {launch.step.name: launch for launch in run.launches}
    run.weights.go_beside(launches[first], run.constants[first])

    def joins(name: str) -> int:
        before = run.weights._beside.joins
        run.weights.join_for(launches[name], run.constants[name])
        return run.weights._beside.joins - before

    assert (joins(plain), joins(last)) == (0, 0)
    run.compute()
    assert (joins(plain), joins(last)) == (0, 1)
    run.state["w1"] = torch.randn(12)[::2]
    run.compute()
    assert (joins(plain), joins(last)) == (1, 1)
    run.weights.end()
    assert (joins(plain), joins(last)) == (0, 0)
