"""The gradient of a convolution's image, and what a step computes after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plantune.errors import IllegalCandidate
from plantune.graph import Node, Step
from plantune.kernels.legality import refuse
from plantune.kernels.patterns.epilogue import ConvEpilogue, Sum, require_constants
from plantune.kernels.patterns.expression import Chain
from plantune.kernels.patterns.sums import kept_axes

PARTS = {"add": "residual", "relu_grad": "saved", "apart_grad": "saved"}
POOL = "avg_pool2d_grad"
ADDED = ("sum", "sum_to")
# Their names in a chain.
IN_CHAIN = {"add": "residual", "relu_grad": "mask", "apart_grad": "mask.apart"}


def image_gradient(step: Step) -> ConvEpilogue:
    """Reads a step as the gradient of an image, with another gradient added to it, and the gradient
    of a ReLU, each optional; raises IllegalCandidate with the reason.

    The other gradient may be that of an average pool, which is in the step then. One value on the
    way may leave the step, too, and sums of each.
    """
    pools = [node for node in step.nodes if node.op == POOL]
    added = [node for node in step.nodes if node.op in ADDED]
    rest = [node for node in step.nodes if node not in (*pools, *added)]
    conv = rest.pop(0) if rest else step.nodes[0]
    if conv.op != "conv2d_dgrad":
        raise IllegalCandidate(f"the step starts with {conv.op}, not with an image's gradient")
    parts: dict[str, str] = {}
    chains: dict[str, Chain] = {conv.name: ()}
    last = conv.name
    for node in rest:
        part = _part(step, node, last, parts)
        parts[part] = next(value for value in node.inputs if value != last)
        if node.op == "apart_grad":
            parts["offset"] = node.inputs[2]
        chains[node.name] = (*chains[last], IN_CHAIN[node.op])
        last = node.name
    pool = _pool(step, conv, pools, parts)
    if pool is not None:
        parts["residual"] = pool.inputs[0]
    require_constants(step, conv, parts, images=("residual", "saved"))
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
    others: dict[str, Any] = {**parts, "unshifted": unshifted, "inner": inner}
    return ConvEpilogue(conv, chain=chains[last], sums=sums, pool=pool, **others)


def _pool(step: Step, conv: Node, pools: Sequence[Node], parts: Mapping[str, str]) -> Node | None:
    """The pool whose gradient is the residual, if there is one; a pixel has up to 2x2 of its
    windows, as it has taps of the convolution.
    """
    if not pools:
        return None
    pool, attrs = pools[0], pools[0].attrs
    sides: Any = (attrs["kernel"], attrs["stride"])
    many = any(kernel > 2 * stride for kernel, stride in zip(*sides, strict=True))
    counted = attrs["count_padding"] or attrs["padding"] == (0, 0)
    beside = [name for name, _ in step.outputs if name == pool.name]
    refuse(
        {
            "the gradient of the pool is not what is added": len(pools) > 1
            or parts.get("residual") != pool.name,
            "the gradient of the pool is read beside it": beside,
            "the pool has another stride": attrs["stride"] != conv.attrs["stride"],
            "a pixel is in more than 2x2 windows of the pool": many,
            "windows of the pool count other pixels at the border": not counted,
        }
    )
    return pool


def _part(step: Step, node: Node, last: str, before: dict[str, str]) -> str:
    """Which part a node is."""
    part = PARTS.get(node.op)
    images = node.inputs[:2]
    shapes = {step.types[value].shape for value in images}
    fits = len({*images}) == 2 and shapes == {step.types[last].shape}
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
