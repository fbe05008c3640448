"""Decides which casts a step may skip.

A step computes floats of up to 32 bits in float32, so a widening cast costs nothing inside it. A
cast that is not in the user's code, such as autocast's, may be skipped: the result is closer to
float64. A narrowing cast in the user's code always rounds, in the step or when it is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plantune.graph.ops.cast import INSERTED
from plantune.graph.types import TensorType

if TYPE_CHECKING:
    from plantune.graph.graph import Node
    from plantune.graph.step import Step

# What is computed in float32.
SINGLE = ("float32", "float16", "bfloat16")


def is_cast(node: Node, source: TensorType) -> bool:
    """Whether a node casts between floats of up to 32 bits."""
    return node.op == "cast" and source.dtype in SINGLE and node.types[0].dtype in SINGLE


def widens(node: Node) -> bool:
    """Whether a cast loses nothing."""
    return node.types[0].dtype == "float32"


def is_free(node: Node, source: TensorType) -> bool:
    """Whether a step may skip a node and use its source instead."""
    return is_cast(node, source) and (widens(node) or INSERTED in node.attrs)


def rounds(node: Node, source: TensorType) -> bool:
    """Whether a cast of the user's code loses digits."""
    return is_cast(node, source) and not is_free(node, source)


def is_free_at_end(node: Node, source: TensorType) -> bool:
    """The same where the result is only stored: from float32 that rounds once, as eager does."""
    return is_free(node, source) or (is_cast(node, source) and source.dtype == "float32")


def stores_wider(step: Step) -> bool:
    """Whether a step of several nodes ends by storing in float32 what it has in 16 bits, which
    readers could take as it is.
    """
    *before, last = step.nodes
    narrow = ("float16", "bfloat16")
    return (
        bool(before)
        and last.op == "cast"
        and widens(last)
        and step.types[last.inputs[0]].dtype in narrow
    )


def rounding_casts(step: Step) -> tuple[str, ...]:
    """The casts that round inside a step, because its own nodes read their results."""
    read = {value for node in step.nodes for value in node.inputs}
    return tuple(
        node.name
        for node in step.nodes
        if node.name in read and node.op == "cast" and rounds(node, step.types[node.inputs[0]])
    )
