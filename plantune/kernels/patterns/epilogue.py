"""What a step computes after its convolution, as kernels with an epilogue take it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plantune.errors import IllegalCandidate
from plantune.graph import Node, Step
from plantune.graph.contraction import stores_as_made
from plantune.graph.ops.functions import FUNCTIONS
from plantune.graph.ops.pointwise import numbers_apart
from plantune.graph.types import DTYPES
from plantune.kernels.family import Parts
from plantune.kernels.legality import READ_OUTSIDE, not_of, refuse
from plantune.kernels.patterns.expression import ADDED, Chain, functions_in
from plantune.kernels.weights.constants import Arrangement, channel_values

APART = ("float16", "bfloat16")  # as which a sum is kept


@dataclass(frozen=True)
class Sum:
    """The sum `name` of what the beginning `chain` of a chain makes: of all, or of each channel."""

    name: str
    chain: Chain
    of_channels: bool


@dataclass(frozen=True)
class ConvEpilogue:
    """y = conv(x, w) * scale + bias, then what `chain` names, each part optional.

    `scale` and `bias` are one value or one per channel, `offset` is one value; all are constant.
    `unshifted` is the value before the offset if that leaves the step too, or the result before it
    is cast. Gradients of images have the result of a ReLU, `saved`, and may hand out a value
    earlier in the chain, and sums.

    `step.types` says of which type each of these is in memory.
    """

    conv: Node
    scale: str | None = None
    bias: str | None = None
    residual: str | None = None
    chain: Chain = ()
    offset: str | None = None
    unshifted: str | None = None
    saved: str | None = None
    inner: Chain | None = None
    sums: tuple[Sum, ...] = ()
    pool: Node | None = None  # whose gradient the residual becomes before it is added

    @property
    def unshifted_chain(self) -> Chain:
        """What is done to the value that leaves, too."""
        return self.chain[:-1] if self.inner is None else self.inner

    @property
    def images(self) -> dict[str, str]:
        """What is read beside the convolution's own image, by the words of kernels."""
        named = {"residual": self.residual, "saved": self.saved}
        return {word: name for word, name in named.items() if name is not None}

    def only_function(self) -> str | None:
        """The one function, for kernels that apply it after the residual and before the offset;
        raises IllegalCandidate if there are more, or another order.
        """
        function = next(iter(functions_in(self.chain)), None)
        usual = self.chain == usual_chain(self.residual, function, self.offset)
        refuse({"only one function, after the residual, may follow": not usual})
        return function


def usual_chain(
    residual: str | None, function: str | None, offset: str | None, offset_by: str = "offset"
) -> Chain:
    """The order that most networks have."""
    parts = ("residual" if residual else None, function, offset_by if offset else None)
    return tuple(part for part in parts if part is not None)


@dataclass(frozen=True)
class ConvParts(Parts):
    """A step that is a convolution with an epilogue, and maybe something before or after it."""

    epilogue: ConvEpilogue

    @property
    def conv(self) -> Node:
        return self.epilogue.conv

    @property
    def x(self) -> str:
        """The image that the step reads."""
        return self.step.nodes[0].inputs[0]

    @property
    def weight(self) -> str:
        return self.conv.inputs[1]

    @property
    def y(self) -> str:
        """What the step makes."""
        return self.step.nodes[-1].name

    @property
    def dtype(self) -> str:
        """Of the factors of products."""
        return self.conv.types[0].dtype

    @property
    def outputs(self) -> int:
        """Channels of the convolution."""
        return self.conv.types[0].shape[1]

    @property
    def pixels(self) -> int:
        """Pixels of the convolution, of all images."""
        images, _, rows, columns = self.conv.types[0].shape
        return images * rows * columns


def usual_parts(step: Step) -> ConvParts:
    """Reads a step as a convolution and its epilogue, for kernels that apply one function after the
    residual; see `conv_epilogue`.
    """
    epilogue = conv_epilogue(step)
    epilogue.only_function()
    return ConvParts(step, epilogue)


def conv_epilogue(step: Step, *, unshifted: bool = False, twice: bool = False) -> ConvEpilogue:
    """Reads a step as a convolution and its epilogue; raises IllegalCandidate with the reason.

    `unshifted` admits steps that also hand out the value before the offset, `twice` such that store
    their result in two element types: it is `unshifted`, and a cast of it the last node.
    """
    return epilogue_of(step, step.nodes, unshifted=unshifted, twice=twice)


def epilogue_of(
    step: Step,
    nodes: Sequence[Node],
    *,
    unshifted: bool = False,
    twice: bool = False,
    beside: Collection[str] = (),
) -> ConvEpilogue:
    """Reads these last nodes of a step as a convolution and its epilogue; what leaves `beside` them
    is made elsewhere.
    """
    conv, *rest = nodes
    if conv.op != "conv2d":
        raise IllegalCandidate(f"the step starts with {conv.op}, not with a convolution")
    stored_twice = twice and bool(rest) and is_stored_twice(step, rest[-1])
    rest = rest[:-1] if stored_twice else rest
    leaving = {name for name, _ in step.outputs} - {step.nodes[-1].name, *beside}
    parts: dict[str, str] = {}
    chain: list[str] = []
    last = conv.name
    for node in rest:
        part, operand = _part(step, node, last, (*parts, *chain))
        if operand is not None:
            parts[part] = operand
        if part not in ("scale", "bias"):
            chain.append(offset_by(node) if part == "offset" else part)
        last = node.name
    require_constants(step, conv, parts)
    offset = parts.get("offset")
    before = next((v for v in rest[-1].inputs if v != offset), None) if offset else None
    admitted = stored_twice or unshifted
    before, inner = (last, tuple(chain)) if stored_twice else (before, None)
    refuse({READ_OUTSIDE: leaving and not (admitted and leaving == {before})})
    others: dict[str, Any] = {**parts, "unshifted": before if leaving else None}
    return ConvEpilogue(conv, chain=tuple(chain), inner=inner, **others)


def is_stored_twice(step: Step, node: Node) -> bool:
    """Whether a node is the cast of a value that leaves the step, too; not one that rounds what is
    stored with more digits.
    """
    leave = {node.inputs[0], node.name} <= dict(step.outputs).keys()
    return node.op == "cast" and leave and stores_as_made(step, node)


def not_factors(step: Step, product: Node) -> dict[str, bool]:
    """Why a kernel that multiplies what is in memory does not run the step: a factor that each call
    brings has another element type than the product. Weights are brought into it.
    """
    given = (name for name in product.inputs if name in dict(step.inputs))
    images = [name for name in given if name not in step.constants]
    return not_of(step, product.types[0].dtype, *images)


def require_constants(
    step: Step, conv: Node, parts: Mapping[str, str], images: Collection[str] = ("residual",)
) -> None:
    """Raises IllegalCandidate unless each call brings the images, which are the convolution's own
    and the `images` among the parts, and all else is constant.
    """
    for part, operand in (("weight", conv.inputs[1]), *parts.items()):
        if part not in images and operand not in step.constants:
            raise IllegalCandidate(f"the {part} {operand!r} is not constant between calls")
    for image in {conv.inputs[0], *map(parts.get, images)} & step.constants:
        # Constants are in nchw, whatever layout the images of a kernel have.
        raise IllegalCandidate(f"{image!r} is constant, not an image that each call brings")


def offset_by(node: Node) -> str:
    """What a chain calls the addition of an offset; "apart" with other numbers than a dtype's."""
    if node.op != "add_apart":
        return "offset"
    of = (dtype for dtype in APART if numbers_apart(DTYPES[dtype]) == node.attrs)
    return next((f"apart.{dtype}" for dtype in of), "apart")


def channel_parts(
    step: Step, epilogue: ConvEpilogue, prefix: str = ""
) -> dict[str, tuple[str, Arrangement]]:
    """Scale, bias and offset if there are any, as kernels read numbers of each channel."""
    product = epilogue.conv.types[0]
    named = {part: getattr(epilogue, part) for part in ("scale", "bias", "offset")}
    return {
        prefix + part: (name, channel_values(product, 1 if part == "offset" else product.shape[1]))
        for part, name in named.items()
        if name is not None
    }


def _part(step: Step, node: Node, last: str, before: Chain) -> tuple[str, str | None]:
    """Which part of the epilogue a node is, and the value it brings."""
    if last not in node.inputs:
        raise IllegalCandidate(f"{node.name!r} does not read {last!r}, the value before it")
    others = [value for value in node.inputs if value != last]
    part, operand = _kind(step, node, others, before), next(iter(others), None)
    if step.types[node.name].shape != step.types[last].shape:
        raise IllegalCandidate(f"{node.op} at {node.name!r} has no place: it changes the shape")
    if part is None or not _may_follow(part, before):
        raise IllegalCandidate(f"{node.op} at {node.name!r} has no place in the epilogue")
    return part, operand


def _may_follow(part: str, before: Chain) -> bool:
    """Scale and bias come first, the offset last; each value that is read once at most."""
    if part in ("scale", "bias"):
        return {*before} <= ({"scale"} if part == "bias" else set())
    return "offset" not in before and not (part == "residual" and part in before)


def _kind(step: Step, node: Node, others: list[str], before: Chain) -> str | None:
    if node.op in FUNCTIONS:
        return node.op
    if node.op == "add_apart":
        return "offset" if before[-1:] == ("relu",) and offset_by(node) in ADDED else None
    if len(others) != 1 or node.op not in ("add", "mul", "add_channel", "mul_channel"):
        return None
    scalar = step.types[others[0]].numel == 1
    by_channel = node.op.endswith("_channel") and node.attrs["axis"] == 1
    if node.op in ("mul", "mul_channel"):
        return "scale" if scalar or by_channel else None
    if scalar or by_channel:
        return "offset" if scalar and not FUNCTIONS.keys().isdisjoint(before) else "bias"
    same = step.types[others[0]].shape == step.types[node.name].shape
    return "residual" if same else None
