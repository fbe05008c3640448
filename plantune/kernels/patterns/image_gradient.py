"""The gradient of a convolution's image, and what a step computes after it."""

from __future__ import annotations

from collections.abc import Mapping

from plantune.errors import IllegalCandidate
from plantune.graph.graph import Node
from plantune.graph.step import Step
from plantune.kernels.legality import refuse
from plantune.kernels.patterns.epilogue import ConvEpilogue, Sum
from plantune.kernels.patterns.expression import Chain
from plantune.kernels.patterns.sums import kept_axes

PARTS = {"add": "residual", "relu_grad": "saved"}
ADDED = ("sum", "sum_to")
# What a chain calls them.
IN_CHAIN = {"residual": "residual", "saved": "mask"}


def image_gradient(step: Step) -> ConvEpilogue:
    """Reads a step as the gradient of an image, with another gradient added to it, and the gradient
    of a ReLU, each optional; raises IllegalCandidate with the reason.

    One value on the way may leave the step, too, and sums of each.
    """
    conv, *rest = step.nodes
    if conv.op != "conv2d_dgrad":
        raise IllegalCandidate(f"the step starts with {conv.op}, not with an image's gradient")
    added = [node for node in rest if node.op in ADDED]
    parts: dict[str, str] = {}
    chains: dict[str, Chain] = {conv.name: ()}
    last = conv.name
    for node in rest:
        if node not in added:
            part = _part(step, node, last, parts)
            parts[part] = next(value for value in node.inputs if value != last)
            chains[node.name] = (*chains[last], IN_CHAIN[part])
            last = node.name
    _require_constants(step, conv, parts)
    sums = tuple(_sum(step, node, chains) for node in added)
    leaving = {name for name, _ in step.outputs} - {node.name for node in added}
    refuse(
        {
            f"the gradient {last!r} does not leave the step": last not in leaving,
            "two values before the end of the step are read outside of it": len(leaving) > 2,
        }
    )
    unshifted = next(iter(leaving - {last}), None)
    inner = None if unshifted is None else chains[unshifted]
    chain = chains[last]
    return ConvEpilogue(conv, chain=chain, unshifted=unshifted, inner=inner, sums=sums, **parts)


def _part(step: Step, node: Node, last: str, before: dict[str, str]) -> str:
    """Which part a node is."""
    part = PARTS.get(node.op)
    types = {step.types[value] for value in node.inputs}
    fits = len({*node.inputs}) == 2 and types == {step.types[last]}
    reads = last in node.inputs and (part != "saved" or node.inputs[0] == last)
    if part is None or not (fits and reads) or part in before or "saved" in before:
        raise IllegalCandidate(f"{node.op} at {node.name!r} has no place after the gradient")
    return part


def _sum(step: Step, node: Node, chains: Mapping[str, Chain]) -> Sum:
    """What a node adds: to one value, or to one of each channel."""
    kept, (value,) = kept_axes(step, node), node.inputs
    leaves = node.name in dict(step.outputs)
    if value not in chains or kept not in ((), (1,)) or not leaves:
        raise IllegalCandidate(f"{node.op} at {node.name!r} has no place after the gradient")
    return Sum(node.name, chains[value], of_channels=kept == (1,))


def _require_constants(step: Step, conv: Node, parts: dict[str, str]) -> None:
    """The weight is one, and no image is."""
    if conv.inputs[1] not in step.constants:
        raise IllegalCandidate(f"the weight {conv.inputs[1]!r} is not constant between calls")
    for image in {conv.inputs[0], *parts.values()} & step.constants:
        raise IllegalCandidate(f"{image!r} is constant, not an image that each call brings")
