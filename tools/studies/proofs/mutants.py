"""Mistakes in the framework's kernels that every proof must see: arithmetic of too few digits, a
border without its padding, two scalars in each other's place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from plantune.graph import Graph, Node, Step
from plantune.graph.ops.conv import geometry
from plantune.kernels.families import framework
from plantune.kernels.torch_ops import viewed

PRODUCTS = ("conv2d", "conv2d_dgrad", "conv2d_wgrad", "matmul")
NORMS = ("batch_norm", "layer_norm", "group_norm")
# Bits of a float32's fraction that tf32 does not have.
LOST = -1 << 13

Runnable = Callable[[], object]
Values = dict[str, Tensor]
# Those that run as one call, such as a product and its bias.
Nodes = tuple[Node, ...]
# Runs that call with a mistake in one of its nodes.
Mistake = Callable[[Node, Nodes, Values, Runnable], None]


def rounded_to(dtype: torch.dtype) -> Mistake:
    """One rounding of what the call makes."""

    def run(node: Node, together: Nodes, values: Values, call: Runnable) -> None:
        call()
        made = values[together[-1].outputs[0]]
        made.copy_(made.to(dtype))

    return run


def in_tf32(node: Node, together: Nodes, values: Values, call: Runnable) -> None:
    """Both factors lose 13 bits."""
    with _given(values, {name: _cut(values[name]) for name in node.inputs}):
        call()


def with_weight_as_bias(node: Node, together: Nodes, values: Values, call: Runnable) -> None:
    weight, bias = node.inputs[1:3]
    with _given(values, {weight: values[bias], bias: values[weight]}):
        call()


def with_a_wrong_border(node: Node, together: Nodes, values: Values, call: Runnable) -> None:
    """The image's edge in the place of zeros around it."""
    call()
    x, w = (values[name] for name in node.inputs)
    height, width = node.attrs["padding"]
    around = nn.functional.pad(x, (width, width, height, height), mode="replicate")
    bias = values[together[1].inputs[1]] if together[1:] else None
    wrong = torch.conv2d(around, w, bias, **{**geometry(node.attrs), "padding": 0})
    values[together[-1].outputs[0]].copy_(wrong)


def _rounds(node: Node) -> bool:
    return viewed(node) is None and node.types[0].dtype == "float32"


def _multiplies(node: Node) -> bool:
    return node.op in PRODUCTS and node.types[0].dtype == "float32"


def _has_two_scalars(node: Node) -> bool:
    return node.op in NORMS and len(set(node.inputs[1:3])) == 2


def _has_a_border(node: Node) -> bool:
    return node.op == "conv2d" and any(node.attrs["padding"])


# By name: which nodes can have the mistake, and how they run with it.
MUTANTS: dict[str, tuple[Callable[[Node], bool], Mistake]] = {
    "rounded to bfloat16": (_rounds, rounded_to(torch.bfloat16)),
    "rounded to float16": (_rounds, rounded_to(torch.float16)),
    "in tf32": (_multiplies, in_tf32),
    "a missing border": (_has_a_border, with_a_wrong_border),
    "two swapped scalars": (_has_two_scalars, with_weight_as_bias),
}


def places(mutant: str, whole: Graph | Step) -> list[Node]:
    """The nodes that can have the mistake."""
    can, _ = MUTANTS[mutant]
    return [node for node in whole.nodes if can(node)]


@contextmanager
def mutated(mutant: str, place: Node) -> Iterator[None]:
    """Inside, the framework's kernels for this node are wrong."""
    plain, (_, mistake) = framework.call_together, MUTANTS[mutant]

    def call_together(nodes: Nodes, values: Values, *others: Any) -> Runnable:
        call = plain(nodes, values, *others)
        return call if place not in nodes else lambda: mistake(place, nodes, values, call)

    framework.call_together = call_together
    try:
        yield
    finally:
        framework.call_together = plain


def _cut(x: Tensor) -> Tensor:
    kept = x.contiguous().view(torch.int32) & LOST
    return torch.empty_like(x).copy_(kept.view(torch.float32))


@contextmanager
def _given(values: Values, others: Values) -> Iterator[None]:
    before = {name: values[name] for name in others}
    values.update(others)
    try:
        yield
    finally:
        values.update(before)
