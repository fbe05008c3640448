"""A 1x1 convolution, with bias, ReLU and offset, that follows an op on pixels."""

from __future__ import annotations

from plantune.canonical import Attrs
from plantune.errors import IllegalCandidate
from plantune.graph.step import Step
from plantune.kernels.patterns.epilogue import ConvEpilogue, epilogue_of

PLAIN = {"stride": (1, 1), "padding": (0, 0), "groups": 1}


def pointwise_conv_behind(
    step: Step, op: str, *, skipped: int = 0, unshifted: bool = False
) -> ConvEpilogue:
    """Reads a step as `op` and a 1x1 convolution; raises IllegalCandidate with the reason.

    The first nodes, `skipped` of them, are read elsewhere.
    """
    first, *rest = step.nodes[skipped:] or step.nodes
    if first.op != op or not rest or rest[0].inputs[0] != first.name:
        raise IllegalCandidate(f"the step does not start with {op} and its convolution")
    epilogue = epilogue_of(step, rest, unshifted=unshifted)
    kernel = step.types[epilogue.conv.inputs[1]].shape[2:]
    if kernel != (1, 1) or not _is_plain(epilogue.conv.attrs):
        raise IllegalCandidate("only a 1x1 convolution of stride 1 without padding and groups")
    if epilogue.scale is not None or epilogue.residual is not None:
        raise IllegalCandidate("only a bias, ReLU and offset may follow it")
    return epilogue


def _is_plain(attrs: Attrs) -> bool:
    return all(attrs[name] == value for name, value in PLAIN.items())
