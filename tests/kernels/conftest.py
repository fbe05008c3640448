from __future__ import annotations

from collections.abc import Callable

import pytest

from plantune.canonical import Attrs
from plantune.graph.builder import GraphBuilder
from plantune.graph.graph import Graph
from plantune.graph.step import Step, make_step
from plantune.graph.types import TensorType
from plantune.kernels.family import Candidate
from plantune.kernels.registry import why_not
from plantune.space.search_space import SearchSpace, load_search_space


class Builder:
    """Spells steps shortly: `x` and `w` declare inputs and constants, `__call__` adds a node."""

    def __init__(self, dtype: str) -> None:
        self.graph = GraphBuilder()
        self.dtype = dtype

    def x(self, *shape: int) -> str:
        return self.graph.input(f"x{len(self.graph.inputs)}", TensorType(shape, self.dtype))

    def w(self, *shape: int) -> str:
        return self.graph.parameter(f"w{len(self.graph.parameters)}", TensorType(shape, self.dtype))

    def __call__(self, op: str, *inputs: str, **attrs: object) -> str:
        return self.graph.emit(op, *inputs, **attrs)[0]

    def conv(self, x: str, w: str, **changed: object) -> str:
        plain = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
        return self("conv2d", x, w, **{**plain, **changed})

    def linear(self, x: str, w: str) -> str:
        return self("matmul", x, w, transpose_a=False, transpose_b=True)


@pytest.fixture(scope="session")
def space() -> SearchSpace:
    return load_search_space("cpu")


@pytest.fixture
def graph_of() -> Callable[..., Graph]:
    """The graph of all nodes which `emit` adds; what `emit` returns leaves it."""

    def make(emit: Callable[[Builder], str | tuple[str, ...]], dtype: str = "float32") -> Graph:
        builder = Builder(dtype)
        outputs = emit(builder)
        return builder.graph.build((outputs,) if isinstance(outputs, str) else outputs)

    return make


@pytest.fixture
def step_of(graph_of: Callable[..., Graph]) -> Callable[..., Step]:
    """The step that covers such a graph."""

    def make(emit: Callable[[Builder], str | tuple[str, ...]], dtype: str = "float32") -> Step:
        graph = graph_of(emit, dtype)
        return make_step(graph, [node.name for node in graph.nodes])

    return make


@pytest.fixture
def refusal(space: SearchSpace) -> Callable[..., str | None]:
    """Why a family with this config cannot run a step."""

    def reason(step: Step, family: str, **config: object) -> str | None:
        return why_not(step, Candidate(family, Attrs(config)), space)

    return reason
