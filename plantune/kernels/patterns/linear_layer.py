"""Reads steps as a matrix product with bias and activation."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from plantune.graph import Node, Step
from plantune.graph.ops.functions import FUNCTIONS
from plantune.kernels.family import Parts
from plantune.kernels.legality import not_the_end_alone, refuse


@dataclass(frozen=True)
class LinearLayer(Parts):
    """y (m, n) = activation(product of a and b, depth terms each, + bias)."""

    product: Node
    bias: str | None
    activation: str | None

    @property
    def a(self) -> str:
        return self.product.inputs[0]

    @property
    def b(self) -> str:
        return self.product.inputs[1]

    @property
    def y(self) -> str:
        return self.step.nodes[-1].name

    @property
    def sizes(self) -> tuple[int, int, int]:
        """m, n and depth."""
        m, n = self.product.types[0].shape
        return m, n, self.step.types[self.a].shape[0 if self.product.attrs["transpose_a"] else 1]


def linear_layer_of(step: Step) -> LinearLayer:
    """Reads a step; raises IllegalCandidate with the reason."""
    product, *rest = step.nodes
    ops = step.ops
    first = ops[0] == "matmul" and ops[1:2] in ((), ("add_channel",)) and len(ops) <= 3
    refuse({"only a matrix product with bias and activation": not first})
    unread = {
        f"{node.name!r} does not read {before.name!r} before it": node.inputs[0] != before.name
        for before, node in itertools.pairwise(step.nodes)
    }
    refuse(
        {
            f"{ops[-1]} is none of {', '.join(FUNCTIONS)}": ops[2:3] and ops[2] not in FUNCTIONS,
            **unread,
            **not_the_end_alone(step),
            "the bias is not one per column": rest and rest[0].attrs["axis"] != 1,
        }
    )
    bias = rest[0].inputs[1] if rest else None
    return LinearLayer(step, product, bias, ops[2] if len(ops) == 3 else None)
