"""Random inputs for a proof. Numbers may be any; of integers only some make sense."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plantune.base.canonical import words
from plantune.graph import Graph, Node, TensorType
from plantune.graph.layouts import in_layout
from plantune.graph.ops import op_named
from plantune.graph.ops.overload import EMBEDDING

# These hand integers on as they are, in another order or shape.
KEEPS = frozenset(
    words("reshape permute broadcast_to aten.slice.Tensor aten.select.int aten.clone.default")
)
PIXELS = 256


def drawn_inputs(
    graph: Graph,
    examples: Sequence[Tensor | None],
    random: torch.Generator,
    scale: float = 1.0,
) -> tuple[Tensor, ...]:
    """A tensor for each input of the graph.

    Integers that are only looked up in a table are drawn from all of its rows, those that only
    become numbers like pixels. Any others may have to fit together, as lengths, offsets and masks
    do: they are the example's, if there is one.
    """
    given = (*examples, *(None for _ in graph.inputs[len(examples) :]))
    return tuple(
        drawn(type_, random, scale)
        if type_.is_float
        else _integers(graph, name, type_, example, random)
        for (name, type_), example in zip(graph.inputs, given, strict=True)
    )


def drawn(type_: TensorType, random: torch.Generator, scale: float = 1.0) -> Tensor:
    """Normal numbers."""
    made = torch.empty(type_.shape, dtype=type_.torch_dtype, device=random.device)
    made = made.normal_(std=scale, generator=random)
    return in_layout(made, type_.layout) if made.dim() == 4 else made


def _integers(
    graph: Graph, name: str, type_: TensorType, example: Tensor | None, random: torch.Generator
) -> Tensor:
    readers = _readers(graph, name)
    below = [_below(graph, node, value) for node, value in readers]
    if any(limit is None for limit in below) and example is not None:
        return example.detach().to(random.device)
    limits = [limit for limit in below if limit] or [
        _guess(graph, node, value) for node, value in readers
    ]
    least = min([*limits, 2 if type_.dtype == "bool" else 128 if type_.dtype == "int8" else PIXELS])
    made = torch.randint(
        least, type_.shape, generator=random, dtype=type_.torch_dtype, device=random.device
    )
    return in_layout(made, type_.layout) if made.dim() == 4 else made


def _readers(graph: Graph, name: str) -> list[tuple[Node, str]]:
    """The nodes that read the integers of an input, and under which name."""
    same, found = [name], []
    for value in same:
        for node in graph.consumers[value]:
            kept = node.op in KEEPS or (node.op == "cast" and not node.types[0].is_float)
            if kept:
                same.extend(node.outputs)
            else:
                found.append((node, value))
    return found


def _below(graph: Graph, node: Node, value: str) -> int | None:
    """The numbers that a reader takes: 0 if any, None if that is not known."""
    if node.op == "cast":
        return 0
    if node.op == EMBEDDING and node.inputs[0] != value:
        return graph.types[node.inputs[0]].shape[0]
    return None


def _guess(graph: Graph, node: Node, value: str) -> int:
    types = [graph.types[read] for read in node.inputs]
    domain = op_named(node.op).domain(node.inputs.index(value), types, node.attrs)
    return domain.below if domain.kind == "index" else PIXELS
