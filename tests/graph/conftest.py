"""The reference: a whole graph evaluated in float64, node by node, from named tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plantune.graph.graph import Graph
from plantune.graph.ops import op_named
from plantune.graph.partition import Partition
from plantune.graph.step import PHASES
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType, dtype_name

Values = dict[str, Tensor]


def evaluate_graph(graph: Graph, values: Mapping[str, Tensor]) -> Values:
    """Every value of the graph; each is held against the type that the graph says."""
    known = dict(values)
    for node in graph.nodes:
        results = op_named(node.op).evaluate([known[v] for v in node.inputs], node.attrs)
        for name, type_, result in zip(node.outputs, node.types, results, strict=True):
            assert tuple(result.shape) == type_.shape, name
            assert result.is_floating_point() == type_.is_float, name
            known[name] = result
    return known


def random_values(graph: Graph) -> Values:
    """Random numbers for every source, in float64 where the graph has floats."""
    return {name: random_tensor(type_) for name, type_ in graph.sources}


def random_tensor(type_: TensorType) -> Tensor:
    if type_.is_float:
        return torch.randn(type_.shape, dtype=torch.float64)
    return torch.randint(0, 9, type_.shape, dtype=type_.torch_dtype)


def randomise_module(module: nn.Module) -> nn.Module:
    """In float64, with weights, scalars and statistics behind which no mistake can hide."""
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            fan_in = parameter[0].numel() if parameter.dim() > 1 else 4
            parameter.normal_(std=fan_in**-0.5)
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point():
                buffer.uniform_(0.5, 1.5) if name.endswith("var") else buffer.normal_()
            else:
                buffer.random_(0, 9)
    return module


def state_of(module: nn.Module) -> Values:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


class Calls(nn.Module):
    """A module from a function of itself and its inputs, and from children, given by name."""

    def __init__(self, forward: Callable[..., Any], **children: Any) -> None:
        super().__init__()
        self._calls = forward
        for name, child in children.items():
            is_plain = isinstance(child, Tensor) and not isinstance(child, nn.Parameter)
            self.register_buffer(name, child) if is_plain else setattr(self, name, child)

    def forward(self, x: Tensor) -> Any:
        return self._calls(self, x)


def check_extraction(module: nn.Module, *inputs: Tensor, **options: Any) -> Graph:
    """The graph of `module`, whose outputs and updated buffers are those of the module."""
    before = [(name, dict(vars(child))) for name, child in module.named_modules()]
    held = state_of(module)
    types = [TensorType(tuple(x.shape), dtype_name(x.dtype)) for x in inputs]
    graph = extract(module, *types, **options)
    assert [(name, dict(vars(child))) for name, child in module.named_modules()] == before
    torch.testing.assert_close(state_of(module), held, rtol=0, atol=0)

    eager = copy.deepcopy(module)
    given = [x.clone() for x in inputs]
    with torch.no_grad():
        outputs = eager(*given)
    torch.testing.assert_close(given, list(inputs), rtol=0, atol=0)  # else the case is a bad one

    names = [name for name, _ in graph.inputs]
    known = evaluate_graph(graph, {**held, **dict(zip(names, inputs, strict=True))})
    outputs = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    for name, expected in zip(graph.outputs, outputs, strict=True):
        torch.testing.assert_close(known[name], expected, rtol=1e-9, atol=1e-10)
    moved = {**held, **{buffer: known[value] for buffer, value in graph.updates}}
    torch.testing.assert_close(moved, state_of(eager), rtol=1e-9, atol=1e-10)
    return graph


def run_steps(graph: Graph, steps: Partition, sources: Values) -> Values:
    """Step by step: each sees its own inputs alone, and hands on its outputs alone."""
    known = dict(sources)
    for step in steps:
        if step.phase == "refresh":
            assert graph.constants.issuperset(name for name, _ in step.inputs), step.name
        results = step.evaluate({name: known[name] for name, _ in step.inputs})
        known.update({name: results[name] for name, _ in step.outputs})
    return {name: known[name] for name in graph.results}


def check_partition(graph: Graph, steps: Partition) -> None:
    """The steps cover the graph exactly, phase after phase, and give its results."""
    covered = [node.name for step in steps for node in step.nodes]
    assert sorted(covered) == sorted(node.name for node in graph.nodes)
    phases = [PHASES.index(step.phase) for step in steps]
    assert phases == sorted(phases)
    values = random_values(graph)
    values = {k: v.abs() if k.endswith("var") else v for k, v in values.items()}
    known = evaluate_graph(graph, values)
    expected = {name: known[name] for name in graph.results}
    torch.testing.assert_close(
        run_steps(graph, steps, values), expected, rtol=0, atol=0, equal_nan=True
    )


@pytest.fixture(scope="session")
def evaluate() -> Callable[[Graph, Mapping[str, Tensor]], Values]:
    return evaluate_graph


@pytest.fixture(scope="session")
def draw() -> Callable[[Graph], Values]:
    return random_values


@pytest.fixture(scope="session")
def randomise() -> Callable[[nn.Module], nn.Module]:
    return randomise_module


@pytest.fixture(scope="session")
def state() -> Callable[[nn.Module], Values]:
    return state_of


@pytest.fixture(scope="session")
def extracts() -> Callable[..., Graph]:
    return check_extraction


@pytest.fixture(scope="session")
def calls() -> type[Calls]:
    return Calls


@pytest.fixture(scope="session")
def runs() -> Callable[[Graph, Partition], None]:
    return check_partition
