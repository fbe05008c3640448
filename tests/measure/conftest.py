from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest

from plantune.base.canonical import Attrs
from plantune.errors import WrongResult
from plantune.graph.builder import GraphBuilder
from plantune.graph.step import Step, make_step
from plantune.graph.types import TensorType
from plantune.kernels.family import AnyFamily, Binding, Candidate, Frame, KernelFamily, Parts
from plantune.measure.numerics import Numerics, check
from plantune.space.search_space import SearchSpace, load_search_space

Twist = Callable[[Step, Frame], None]


class Fake(KernelFamily[Parts]):
    """Computes a step by its meaning, then lets `twist` spoil the launch."""

    name: ClassVar = "fake"
    arch_kinds = frozenset(("cpu",))

    def __init__(self, twist: Twist, workspace: int = 0) -> None:
        self.twist = twist
        self.workspace = workspace

    def read(self, step: Step) -> Parts:
        return Parts(step)

    def configs(self, space: SearchSpace) -> tuple[Attrs, ...]:
        return (Attrs(),)

    def workspace_bytes(self, parts: Parts, config: Attrs) -> int:
        return self.workspace

    def bind(self, parts: Parts, config: Attrs, frame: Frame) -> Binding:
        step = parts.step

        def launch(stream: int) -> None:
            inputs = {name: frame.values[name] for name, _ in step.inputs}
            known = step.evaluate(inputs)
            for name, _ in step.outputs:
                frame.values[name].copy_(known[name])
            self.twist(step, frame)

        return Binding(launch)


@pytest.fixture(scope="session")
def space() -> SearchSpace:
    return load_search_space("cpu")


@pytest.fixture
def step_of() -> Callable[..., Step]:
    """A step that covers all nodes which `emit` adds to a builder."""

    def make(emit: Callable[[GraphBuilder], tuple[str, ...]]) -> Step:
        builder = GraphBuilder()
        graph = builder.build(emit(builder))
        return make_step(graph, [node.name for node in graph.nodes])

    return make


@pytest.fixture
def check_fake(register: Callable[..., None], space: SearchSpace) -> Callable[..., Numerics]:
    """Checks a step with a family that is registered for this test alone."""

    def run(step: Step, family: AnyFamily, seed: int = 0) -> Numerics:
        register(**{family.name: family})
        return check(step, Candidate(family.name, Attrs()), space, seed)

    return run


@pytest.fixture
def fake() -> type[Fake]:
    return Fake


IMAGE = TensorType((2, 3, 5, 7))


@pytest.fixture
def relu(step_of):
    return step_of(lambda b: b.emit("relu", b.input("x", IMAGE)))


@pytest.fixture
def biased(step_of):
    """relu(x + bias) with a constant bias."""

    def emit(b):
        x, bias = b.input("x", IMAGE), b.parameter("bias", TensorType((3,)))
        (y,) = b.emit("add_channel", x, bias, axis=1)
        return b.emit("relu", y)

    return step_of(emit)


def output(step, frame):
    return frame.values[step.outputs[0][0]]


def caught(check_fake, step, family) -> str:
    """The message of the error that the check raises for a family."""
    with pytest.raises(WrongResult) as error:
        check_fake(step, family)
    return str(error.value)
