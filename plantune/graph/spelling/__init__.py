"""How torch spells the ops of the layer graph: a reader for each overload of ATen that has an op.

A reader takes a `Reader` and the overload's arguments, emits nodes and returns the result's value.
It raises NotRead for arguments that the op does not have; the overload itself is a node then.
"""

from collections.abc import Callable
from typing import Any

from plantune.graph.spelling import arithmetic, casts, fills, layers, recurrent, shapes
from plantune.graph.spelling.reader import NotRead, Reader, Value

OVERLOADS: dict[str, Callable[..., Any]] = {
    **arithmetic.OVERLOADS,
    **casts.OVERLOADS,
    **fills.OVERLOADS,
    **layers.OVERLOADS,
    **recurrent.OVERLOADS,
    **shapes.OVERLOADS,
}

__all__ = ["OVERLOADS", "NotRead", "Reader", "Value"]
