"""What a graph's ops make one after the other, for networks that draw random numbers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from plantune.generators import numbers_of
from plantune.graph.graph import Graph

# Of the random numbers that a network draws where it is compared.
SEED = 0


def evaluated(
    graph: Graph, given: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Every value of a graph from its sources, in its own dtypes or in `dtype`.

    What is random is drawn from one seed, as a program draws it: in its own dtype, row by row.
    """
    known = dict(given)
    if dtype is not None:
        known = {k: t.to(dtype) if t.is_floating_point() else t for k, t in known.items()}
    with numbers_of(next(iter(given.values())).device, SEED):
        for node in graph.nodes:
            values = node.evaluate([known[value] for value in node.inputs], dtype)
            known.update(zip(node.outputs, values, strict=True))
    return known
