"""The gradient of a convolution's image, and what a step computes after it."""

from __future__ import annotations

from plantune.errors import IllegalCandidate
from plantune.graph.graph import Node
from plantune.graph.step import Step
from plantune.kernels.patterns.epilogue import ConvEpilogue

PARTS = {"add": "residual", "relu_grad": "saved"}
# What a chain calls them.
IN_CHAIN = {"residual": "residual", "saved": "mask"}


def image_gradient(step: Step) -> ConvEpilogue:
    """Reads a step as the gradient of an image, with another gradient added to it, and the gradient
    of a ReLU, each optional; raises IllegalCandidate with the reason.

    One value on the way may leave the step, too.
    """
    conv, *rest = step.nodes
    if conv.op != "conv2d_dgrad":
        raise IllegalCandidate(f"the step starts with {conv.op}, not with an image's gradient")
    parts: dict[str, str] = {}
    last = conv.name
    for node in rest:
        part = _part(step, node, last, parts)
        parts[part] = next(value for value in node.inputs if value != last)
        last = node.name
    _require_constants(step, conv, parts)
    chain = tuple(IN_CHAIN[part] for part in parts)
    places = {node.name: place for place, node in enumerate(step.nodes)}
    leaving = [name for name, _ in step.outputs if name != last]
    if len(leaving) > 1:
        raise IllegalCandidate("two values before the end of the step are read outside of it")
    unshifted = next(iter(leaving), None)
    inner = None if unshifted is None else chain[: places[unshifted]]
    return ConvEpilogue(conv, chain=chain, unshifted=unshifted, inner=inner, **parts)


def _part(step: Step, node: Node, last: str, before: dict[str, str]) -> str:
    """Which part a node is."""
    part = PARTS.get(node.op)
    types = {step.types[value] for value in node.inputs}
    fits = len({*node.inputs}) == 2 and types == {step.types[last]}
    reads = last in node.inputs and (part != "saved" or node.inputs[0] == last)
    if part is None or not (fits and reads) or part in before or "saved" in before:
        raise IllegalCandidate(f"{node.op} at {node.name!r} has no place after the gradient")
    return part


def _require_constants(step: Step, conv: Node, parts: dict[str, str]) -> None:
    """The weight is one, and no image is."""
    if conv.inputs[1] not in step.constants:
        raise IllegalCandidate(f"the weight {conv.inputs[1]!r} is not constant between calls")
    for image in {conv.inputs[0], *parts.values()} & step.constants:
        raise IllegalCandidate(f"{image!r} is constant, not an image that each call brings")
