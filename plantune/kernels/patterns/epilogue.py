"""What a step computes after its convolution, as kernels with an epilogue take it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from plantune.errors import IllegalCandidate
from plantune.graph.graph import Node
from plantune.graph.ops.pointwise import along_axis
from plantune.graph.step import Step
from plantune.kernels.constants import Form, channel_values
from plantune.kernels.family import Parts


@dataclass(frozen=True)
class ConvEpilogue:
    """y = relu(conv(x, w) * scale + bias + residual) + offset, each part optional.

    `scale` and `bias` are one value or one per channel, `offset` is one value; all are constant.
    `unshifted` is the value before the offset if that leaves the step too.
    """

    conv: Node
    scale: str | None = None
    bias: str | None = None
    residual: str | None = None
    relu: bool = False
    offset: str | None = None
    unshifted: str | None = None


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


def conv_parts(step: Step, *, unshifted: bool = False) -> ConvParts:
    """Reads a step as a convolution and its epilogue; see `conv_epilogue`."""
    return ConvParts(step, conv_epilogue(step, unshifted=unshifted))


def conv_epilogue(step: Step, *, unshifted: bool = False) -> ConvEpilogue:
    """Reads a step as a convolution and its epilogue; raises IllegalCandidate with the reason.

    `unshifted` admits steps that also hand out the value before the offset.
    """
    return epilogue_of(step, step.nodes, unshifted=unshifted)


def epilogue_of(step: Step, nodes: Sequence[Node], *, unshifted: bool = False) -> ConvEpilogue:
    """Reads these last nodes of a step as a convolution and its epilogue."""
    conv, *rest = nodes
    if conv.op != "conv2d":
        raise IllegalCandidate(f"the step starts with {conv.op}, not with a convolution")
    leaving = {name for name, _ in step.outputs} - {step.nodes[-1].name}
    parts: dict[str, str] = {}
    last = conv.name
    for node in rest:
        part, operand = _part(step, node, last, parts)
        parts[part] = operand
        last = node.name
    for part, operand in (("weight", conv.inputs[1]), *parts.items()):
        if part not in ("residual", "relu") and operand not in step.constants:
            raise IllegalCandidate(f"the {part} {operand!r} is not constant between calls")
    for image in {conv.inputs[0], parts.get("residual")} & step.constants:
        # Constants are in nchw, whatever layout the images of a kernel have.
        raise IllegalCandidate(f"{image!r} is constant, not an image that each call brings")
    offset = parts.get("offset")
    before = next((v for v in rest[-1].inputs if v != offset), None) if offset else None
    if leaving and not (unshifted and leaving == {before}):
        raise IllegalCandidate("a value before the end of the step is read outside of it")
    relu = parts.pop("relu", None) is not None
    return ConvEpilogue(conv, relu=relu, unshifted=before if leaving else None, **parts)


def channel_parts(
    step: Step, epilogue: ConvEpilogue, prefix: str = ""
) -> dict[str, tuple[str, Form]]:
    """Scale, bias and offset where they are there, as kernels read numbers of each channel."""
    channels = epilogue.conv.types[0].shape[1]
    named = {part: getattr(epilogue, part) for part in ("scale", "bias", "offset")}
    return {
        prefix + part: (name, channel_values(step.types[name], 1 if part == "offset" else channels))
        for part, name in named.items()
        if name is not None
    }


# Each part may follow none of these.
NEVER_AFTER = {
    "scale": ("scale", "bias", "residual", "relu", "offset"),
    "bias": ("bias", "residual", "relu", "offset"),
    "residual": ("residual", "relu", "offset"),
    "relu": ("relu", "offset"),
    "offset": ("offset",),
}


def _part(step: Step, node: Node, last: str, parts: dict[str, str]) -> tuple[str, str]:
    """Which part of the epilogue a node is, and the value it brings."""
    if last not in node.inputs:
        raise IllegalCandidate(f"{node.name!r} does not read {last!r}, the value before it")
    others = [value for value in node.inputs if value != last]
    part, operand = _kind(step, node, others, parts), (others or [""])[0]
    if step.types[node.name] != step.types[last]:
        raise IllegalCandidate(f"{node.op} at {node.name!r} has no place: it changes the shape")
    if part is None or any(earlier in parts for earlier in NEVER_AFTER[part]):
        raise IllegalCandidate(f"{node.op} at {node.name!r} has no place in the epilogue")
    return part, operand


def _kind(step: Step, node: Node, others: list[str], parts: dict[str, str]) -> str | None:
    if node.op == "relu":
        return "relu"
    if len(others) != 1 or node.op not in ("add", "mul", "add_channel", "mul_channel"):
        return None
    scalar = step.types[others[0]].numel == 1
    by_channel = node.op.endswith("_channel") and node.attrs["axis"] == 1
    if node.op in ("mul", "mul_channel"):
        return "scale" if scalar or by_channel else None
    if scalar or by_channel:
        return "offset" if scalar and "relu" in parts else "bias"
    same = step.types[others[0]].shape == step.types[node.name].shape
    return "residual" if same else None


def folded_constants(
    epilogue: ConvEpilogue, values: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor | None, float | None]:
    """The scaled weight, the bias per channel, and the least value if there is a ReLU.

    relu(v) + offset is max(v + offset, offset), so the offset goes into the bias too.
    """
    weight = values[epilogue.conv.inputs[1]]
    if epilogue.scale is not None:
        weight = weight * along_axis(values[epilogue.scale], 4, 0)
    bias = None
    for part in (epilogue.bias, epilogue.offset):
        if part is not None:
            channel = values[part].flatten().expand(weight.shape[0]).contiguous()
            bias = channel if bias is None else bias + channel
    least = None
    if epilogue.relu:
        least = 0.0 if epilogue.offset is None else values[epilogue.offset].item()
    return weight, bias, least
