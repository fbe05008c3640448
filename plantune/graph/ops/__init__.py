"""The ops of the layer graph: one object each, with shapes, meaning and backward rule together.

A new op is one class in the file of its kind, and its name in that file's `OPS`; a function of one
number is an entry of the table in `functions.py`. Whatever else torch can run is an op under its
name there (`overload.py`).
"""

from typing import Any

from plantune.errors import InvalidGraph
from plantune.graph.ops import (
    cast,
    conv,
    functions,
    matmul,
    norm,
    own_gradient,
    pointwise,
    pool,
    reduce,
    sample_norm,
    scan,
    shape,
    translate,
)
from plantune.graph.ops.base import Domain, Gradient, Op
from plantune.graph.ops.overload import overload_op

MODULES: Any = (
    *(cast, conv, functions, matmul, norm, own_gradient, pointwise),
    *(pool, reduce, sample_norm, scan, shape, translate),
)
OPS: dict[str, Op] = {op.name: op for module in MODULES for op in module.OPS}


def op_named(name: str) -> Op:
    """The op of that name; raises InvalidGraph naming the known ones."""
    op = OPS.get(name) or overload_op(name)
    if op is None:
        known = ", ".join(sorted(OPS))
        raise InvalidGraph(f"op {name!r} is neither one of {known} nor an overload of torch")
    return op


__all__ = ["OPS", "Domain", "Gradient", "Op", "op_named"]
