"""A 1x1 convolution, alone or after an op on pixels."""

from __future__ import annotations

from plantune.graph import Node, Step
from plantune.kernels.legality import refuse
from plantune.kernels.patterns.epilogue import ConvEpilogue, epilogue_of

POINTWISE = "a 1x1 convolution of stride 1 without padding and groups"
PLAIN = {"stride": (1, 1), "padding": (0, 0), "groups": 1}


def is_pointwise(step: Step, conv: Node) -> bool:
    """Whether each pixel of a convolution's result follows from one of the image."""
    plain = all(conv.attrs[name] == value for name, value in PLAIN.items())
    return plain and step.types[conv.inputs[1]].shape[2:] == (1, 1)


def pointwise_conv_after(
    step: Step,
    op: str,
    *,
    skipped: int = 0,
    unshifted: bool = False,
    kept: bool = False,
) -> ConvEpilogue:
    """Reads a step as `op` and a 1x1 convolution; raises IllegalCandidate with the reason.

    The first nodes, `skipped` of them, are read elsewhere. `kept` admits that what `op` makes
    leaves, too.
    """
    first, *rest = step.nodes[skipped:] or step.nodes
    starts = first.op == op and rest and rest[0].inputs[0] == first.name
    refuse({f"the step does not start with {op} and its convolution": not starts})
    beside = (first.name,) if kept else ()
    epilogue = epilogue_of(step, rest, unshifted=unshifted, beside=beside)
    image, others = first.inputs[0], epilogue.residual is not None or epilogue.scale is not None
    refuse(
        {
            f"only {POINTWISE}": not is_pointwise(step, epilogue.conv),
            "only a bias, functions and an offset may follow it": others,
            f"{image!r} is constant, not an image that each call brings": image in step.constants,
        }
    )
    return epilogue
