"""A convolution with a max pool after it."""

from __future__ import annotations

from plantune.graph import Node, Step
from plantune.kernels.legality import refuse

# The pool of ResNets' first convolutions.
POOL = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1)}


def before_the_pool(step: Step) -> tuple[Node, ...]:
    """The nodes before a max pool that ends the step, or all if none does; raises
    IllegalCandidate for another pool than kernels have.
    """
    *before, last = step.nodes
    if not before or last.op != "max_pool2d":
        return step.nodes
    window = {key: last.attrs[key] for key in POOL}
    refuse(
        {
            "the pool does not read the convolution": last.inputs[0] != before[-1].name,
            "only a pool of 3x3 with stride 2 and padding 1": window != POOL,
        }
    )
    return tuple(before)
