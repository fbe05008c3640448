"""Sums over elements, as steps have them beside what they add."""

from __future__ import annotations

from plantune.graph import Node, Step

SUMS = ("sum", "sum_to", "mean")


def kept_axes(step: Step, node: Node) -> tuple[int, ...]:
    """The axes of a sum's input along which there are several results."""
    shape = step.types[node.inputs[0]].shape
    if node.op == "sum_to":
        to = node.attrs["shape"]
        result = (1,) * (len(shape) - len(to)) + tuple(to)
    else:
        result = tuple(1 if axis in node.attrs["dims"] else n for axis, n in enumerate(shape))
    return tuple(axis for axis, size in enumerate(result) if size > 1)
