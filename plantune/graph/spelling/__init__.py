"""How torch spells the ops of the layer graph: one reader per module class, function or method.

A reader takes a `Reader` and what the call was given, emits nodes and returns the result's value.
"""

from __future__ import annotations

import operator
from typing import Any

from plantune.graph.spelling import arithmetic, casts, layers, shapes
from plantune.graph.spelling.reader import Reader, Spelled, Value
from plantune.graph.spelling.shapes import VIEWS

_ALL: Spelled = {}
for _file in (arithmetic, casts, layers, shapes):
    _ALL |= _file.SPELLED
MODULES = {key: read for key, read in _ALL.items() if isinstance(key, type)}
METHODS = {key: read for key, read in _ALL.items() if isinstance(key, str)}
FUNCTIONS = {key: read for key, read in _ALL.items() if not isinstance(key, (type, str))}

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
