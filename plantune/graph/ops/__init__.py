"""The ops of the layer graph: one object each, with shapes, meaning and backward rule together.

A new op is one class in the file of its kind, and its name in that file's `OPS`; a function of one
number is an entry of the table in `functions.py`.
"""

from plantune.errors import InvalidGraph
from plantune.graph.ops import cast, conv, functions, matmul, norm, pointwise, pool, reduce, shape
from plantune.graph.ops.base import Domain, Gradient, Op

OPS: dict[str, Op] = {
    op.name: op
    for module in (cast, conv, functions, matmul, norm, pointwise, pool, reduce, shape)
    for op in module.OPS
}


def op_named(name: str) -> Op:
    """The op of that name; raises InvalidGraph naming the known ones."""
    if name not in OPS:
        raise InvalidGraph(f"op {name!r} is not one of {', '.join(sorted(OPS))}")
    return OPS[name]


__all__ = ["OPS", "Domain", "Gradient", "Op", "op_named"]
