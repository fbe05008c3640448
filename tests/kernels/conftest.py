from __future__ import annotations

from collections.abc import Callable

import pytest

from plantune.base.canonical import Attrs
from plantune.graph.builder import GraphBuilder
from plantune.graph.graph import Graph
from plantune.graph.ops.cast import INSERTED
from plantune.graph.ops.pointwise import numbers_apart
from plantune.graph.step import Step, make_step
from plantune.graph.types import TensorType
from plantune.kernels.family import Candidate
from plantune.kernels.registry import why_not
from plantune.measure.numerics import check
from plantune.space.search_space import SearchSpace, load_search_space


class Builder:
    """Spells steps shortly: `x` and `w` declare inputs and constants, `__call__` adds a node."""

    def __init__(self, dtype: str) -> None:
        self.graph = GraphBuilder()
        self.dtype = dtype

    def x(self, *shape: int, dtype: str | None = None) -> str:
        name = f"x{len(self.graph.inputs)}"
        return self.graph.input(name, TensorType(shape, dtype or self.dtype))

    def statistics(self, *shape: int) -> str:
        """What a layer norm keeps of its batch."""
        return self.x(*shape, dtype="float64" if self.dtype == "float64" else "float32")

    def w(self, *shape: int, dtype: str | None = None) -> str:
        type_ = TensorType(shape, dtype or self.dtype)
        return self.graph.parameter(f"w{len(self.graph.parameters)}", type_)

    def __call__(self, op: str, *inputs: str, **attrs: object) -> str:
        return self.graph.emit(op, *inputs, **attrs)[0]

    def cast(self, x: str, dtype: str | None = None, *, own: bool = False) -> str:
        """A cast that autocast inserted, or the user's `own`; to the dtype of products."""
        mark = {} if own else {INSERTED: True}
        return self("cast", x, dtype=dtype or self.dtype, **mark)

    def wide(self, x: str) -> str:
        """A value of few digits in float32."""
        return self.cast(x, "float32")

    def all(self, op: str, *inputs: str, **attrs: object) -> tuple[str, ...]:
        return self.graph.emit(op, *inputs, **attrs)

    def conv(self, x: str, w: str, **changed: object) -> str:
        plain = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
        return self("conv2d", x, w, **{**plain, **changed})

    def apart(self, x: str) -> str:
        """A number added to what a ReLU made, as training keeps it."""
        numbers = numbers_apart(TensorType((), self.dtype).torch_dtype)
        return self("add_apart", x, self.w(1), **numbers)

    def linear(self, x: str, w: str) -> str:
        return self("matmul", x, w, transpose_a=False, transpose_b=True)


Emit = Callable[[Builder], str | tuple[str, ...]]


def graph_of(emit: Emit, dtype: str = "float32") -> Graph:
    """The graph of all nodes which `emit` adds; what `emit` returns leaves it."""
    builder = Builder(dtype)
    outputs = emit(builder)
    return builder.graph.build((outputs,) if isinstance(outputs, str) else outputs)


def step_of(emit: Emit, dtype: str = "float32") -> Step:
    """The step that covers such a graph."""
    graph = graph_of(emit, dtype)
    return make_step(graph, [node.name for node in graph.nodes])


@pytest.fixture(name="graph_of")
def _graph_of() -> Callable[..., Graph]:
    return graph_of


@pytest.fixture(name="step_of")
def _step_of() -> Callable[..., Step]:
    return step_of


@pytest.fixture(scope="session")
def space() -> SearchSpace:
    return load_search_space("cpu")


@pytest.fixture
def refusal(space: SearchSpace) -> Callable[..., str | None]:
    """Why a family with this config cannot run a step."""

    def reason(step: Step, family: str, **config: object) -> str | None:
        return why_not(step, Candidate(family, Attrs(config)), space)

    return reason


@pytest.fixture
def require_right(space: SearchSpace) -> Callable[..., None]:
    """Checks what a family with this config makes of a step, and that it gives the same bits."""

    def require(step: Step, family: str, **config: object) -> None:
        candidate = Candidate(family, Attrs(config))
        assert why_not(step, candidate, space) is None
        assert check(step, candidate, space).deterministic

    return require
