"""`torch.compile(module, backend="plantune")`: each graph that Dynamo captures runs from a plan.

Dynamo calls `plantune` for each piece of the user's code between two graph breaks, and then what
that returned in the piece's place as long as its guards hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import SkipFrame
from torch._ops import HigherOrderOperator

from plantune.backend.options import allowance_of
from plantune.backend.piece import Piece, pieces
from plantune.runtime.captured.autograd import TunedPass

__all__ = ["Piece", "pieces", "plantune"]

# Compiled code that calls `backward()` has Dynamo look at what Python autograd runs then: it took
# this package's own functions for the user's, and compiled some 40 of them.
_tuned_pass: Any = TunedPass
_tuned_pass.backward = staticmethod(torch._dynamo.disable(TunedPass.backward))


def plantune(
    graph: fx.GraphModule,
    examples: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Piece:
    """What runs `graph`. Plans that are known are used, and nothing is searched unless `options`
    has a budget: `options={"budget": 60}` is in seconds, for all pieces of the module together.

    `mode` may be any of torch's and changes nothing: the plan says how a piece runs.
    """
    allowance = allowance_of(mode, options)
    for node in graph.graph.nodes:
        if isinstance(node.target, HigherOrderOperator):  # such as a checkpoint
            # Python runs this function then, and Dynamo captures those that it calls.
            raise SkipFrame(f"plantune has no plan for {node.target.name()}")
    return Piece(graph, examples, allowance)
