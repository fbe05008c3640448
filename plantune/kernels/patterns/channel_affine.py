"""What may stand in front of an image's first op: casts, scales and shifts of its channels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plantune.errors import IllegalCandidate
from plantune.graph import Node, Step
from plantune.kernels.family import Frame
from plantune.kernels.weights.constants import Constant

ARITHMETIC = ("affine", "add", "add_channel", "sub", "mul", "mul_channel", "div")
COMMUTE = ("add", "mul")


@dataclass(frozen=True)
class ChannelAffine:
    """y = x * scale + shift, both constant and one of each channel, in another dtype than x's.

    `source` is x and `result` y; they are equal if there are no nodes.
    """

    source: str
    result: str
    nodes: tuple[Node, ...]

    @property
    def scales(self) -> bool:
        """Whether it does more than a cast."""
        return any(node.op != "cast" for node in self.nodes)


def channel_affine_of(step: Step) -> ChannelAffine:
    """Reads the first nodes of a step, none or more; raises IllegalCandidate with the reason."""
    source = last = step.nodes[0].inputs[0]
    taken: list[Node] = []
    for node in step.nodes:
        if node.op not in ("cast", *ARITHMETIC):
            break
        _check(step, node, last)
        taken.append(node)
        last = node.name
    return ChannelAffine(source, last, tuple(taken))


def _check(step: Step, node: Node, last: str) -> None:
    image, before = step.types[node.name], step.types[last]
    if last not in node.inputs[: 2 if node.op in COMMUTE else 1]:
        raise IllegalCandidate(f"{node.name!r} does not read {last!r}, the value before it")
    if len(image.shape) != 4 or image.shape != before.shape:
        raise IllegalCandidate(f"{node.name!r} does not work on each channel of an image")
    if node.op != "cast" and not image.is_float:
        raise IllegalCandidate(f"{node.name!r} computes in {image.dtype}, not a float type")
    for operand in _operands(node, last):
        shape = step.types[operand].shape
        axis = node.attrs["axis"] if node.op.endswith("_channel") else _axis(shape)
        if operand not in step.constants or axis != 1:
            raise IllegalCandidate(f"{operand!r} is not one constant for each channel")


def _operands(node: Node, last: str) -> list[str]:
    """What a node brings; it may read `last` once only."""
    operands = list(node.inputs)
    operands.remove(last)
    return operands


def _axis(shape: tuple[int, ...]) -> int:
    """The axis of an image along which a broadcast value runs; one value counts as channels."""
    axes = [axis for axis, size in enumerate(shape, 4 - len(shape)) if size > 1]
    return axes[0] if len(axes) == 1 else 1 if not axes else -1


class ChannelScales(Constant):
    """Scale and shift of each channel in float32, side by side. They follow from several values,
    so torch computes them in each pass.
    """

    def __init__(self, affine: ChannelAffine, channels: int, frame: Frame) -> None:
        pairs = zip(affine.nodes, (affine.source, *(n.name for n in affine.nodes)), strict=False)
        self._read = tuple(name for node, last in pairs for name in _operands(node, last))
        self._affine = affine
        memory = torch.empty(channels, 2, dtype=torch.float32, device=frame.device)
        super().__init__(frame.values, "".join(self._read[:1]), memory)
        if not self._read:
            self.fill()

    @property
    def constants(self) -> tuple[Constant, ...]:
        """Itself, if it follows from any value."""
        return (self,) if self._read else ()

    @property
    def reads(self) -> tuple[str, ...]:
        return self._read

    @property
    def by_torch(self) -> bool:
        return True

    def fill(self) -> None:
        """Composes what the nodes do, from the first on."""
        both, shift = self.memory, self.memory[:, 1:]
        both.fill_(1)
        shift.zero_()
        last = self._affine.source
        for node in self._affine.nodes:
            for operand in _operands(node, last):
                _apply(node.op, both, shift, self._values[operand].view(-1, 1))
            if node.op == "affine":
                both.mul_(node.attrs["alpha"])
                shift.add_(node.attrs["beta"])
            last = node.name


def _apply(op: str, both: Tensor, shift: Tensor, operand: Tensor) -> None:
    if op in ("mul", "mul_channel"):
        both.mul_(operand)
    elif op == "div":
        both.div_(operand)
    elif op == "sub":
        shift.sub_(operand)
    else:
        shift.add_(operand)
