"""How torch spells the ops of the layer graph: one reader per module class, function or method.

A reader takes a `Reader` and what the call was given, emits nodes and returns the result's value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import nn

from plantune.graph.spelling import arithmetic, casts, layers, shapes
from plantune.graph.spelling.reader import Reader, Value
from plantune.graph.spelling.shapes import VIEWS

MODULES: dict[type[nn.Module], Callable[..., Value]] = {
    **arithmetic.MODULES,
    **layers.MODULES,
    **shapes.MODULES,
}
FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    **arithmetic.FUNCTIONS,
    **layers.FUNCTIONS,
    **shapes.FUNCTIONS,
}
METHODS: dict[str, Callable[..., Any]] = {
    **arithmetic.METHODS,
    **casts.METHODS,
    **shapes.METHODS,
}

# torch ends the names of methods that write to their tensor with an underscore.
IN_PLACE: frozenset[Any] = frozenset(
    (
        *(name for name in METHODS if name.endswith("_")),
        *(operator.iadd, operator.isub, operator.imul, operator.itruediv),
        *(call for call in FUNCTIONS if call.__name__.endswith("_")),
    )
)

__all__ = [
    "FUNCTIONS",
    "IN_PLACE",
    "METHODS",
    "MODULES",
    "VIEWS",
    "Reader",
    "Value",
]
