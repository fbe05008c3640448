"""Reshapes and permutes of axes as a view: nothing is launched, no memory is used."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from plantune.graph import Node, Step, TensorType
from plantune.graph.layouts import MEMORY_FORMATS
from plantune.kernels.family import Arch, Attrs, Binding, Frame, KernelFamily, Parts, refuse

VIEWS = frozenset(("permute", "reshape"))


@dataclass(frozen=True)
class ViewParts(Parts):
    """The layouts in which what is read and what is made are the same memory."""

    read: str = "nchw"
    made: str = "nchw"


class View(KernelFamily[ViewParts]):
    name: ClassVar = "view"
    arch_kinds = frozenset(("cpu", "cuda"))

    def read(self, step: Step) -> ViewParts:
        refuse({"only reshapes and permutes are views": not VIEWS.issuperset(step.ops)})
        if step.ops == ("reshape",):
            return ViewParts(step)
        source, _ = step.inputs[0]
        chained = all(b.inputs == (a.name,) for a, b in itertools.pairwise(step.nodes))
        leaving = [name for name, _ in step.outputs]
        refuse(
            {
                "a weight has no layout that may be asked for": source in step.constants,
                # Each takes what is not dense.
                "reshapes alone are views one by one": "permute" not in step.ops,
                "a value on the way is read by others": not chained
                or leaving != [step.nodes[-1].name],
            }
        )
        pairs = _free_layouts(step)
        refuse({"elements are in another order in memory, too": not pairs})
        return ViewParts(step, *pairs[0])

    def layouts(self, parts: ViewParts, config: Attrs) -> Mapping[str, str]:
        (source, _), (result, _) = parts.step.inputs[0], parts.step.outputs[0]
        return {source: parts.read, result: parts.made}

    def aliases(self, parts: ViewParts, config: Attrs) -> Mapping[str, str]:
        return {parts.step.outputs[0][0]: parts.step.inputs[0][0]}

    def reads_loose(self, parts: ViewParts, config: Attrs) -> frozenset[str]:
        """A reshape of what is not dense is a copy where it must be."""
        source, _ = parts.step.inputs[0]
        reshapes = parts.step.ops == ("reshape",) and source not in parts.step.constants
        return frozenset({source} if reshapes else ())

    def estimate_us(self, parts: ViewParts, config: Attrs, arch: Arch) -> float:
        """A guess must be above zero: what was measured is divided by it."""
        return super().estimate_us(parts, config, arch) if arch.cuda is None else 0.01

    def bind(self, parts: ViewParts, config: Attrs, frame: Frame) -> Binding:
        step, values = parts.step, frame.values
        (source, _), (result, _) = step.inputs[0], step.outputs[0]
        reshapes = step.ops == ("reshape",)
        constant = source in step.constants

        def launch(stream: int) -> None:
            made = values[source]
            for node in step.nodes:
                made = _viewed(node, made)
            # A weight may have any strides, and so may what torch made.
            values[result] = made.contiguous() if reshapes and not constant else made

        return Binding(launch)


def _viewed(node: Node, value: Tensor) -> Tensor:
    if node.op == "permute":
        return value.permute(node.attrs["dims"])
    return value.reshape(node.types[0].shape)


def _free_layouts(step: Step) -> list[tuple[str, str]]:
    """The layouts of what is read and of what is made that need no element moved."""
    (_, x), (_, y) = step.inputs[0], step.outputs[0]
    pairs = itertools.product(_layouts(x), _layouts(y))
    return [(read, made) for read, made in pairs if _is_free(step, x, read, y.strides(made))]


def _is_free(step: Step, x: TensorType, read: str, wanted: tuple[int, ...]) -> bool:
    """Whether views of an `x` in that layout are dense in the wanted one."""
    value = torch.empty_strided(x.shape, x.strides(read), dtype=torch.uint8, device="meta")
    for node in step.nodes:
        shape = node.types[0].shape
        try:
            value = value.permute(node.attrs["dims"]) if node.op == "permute" else value.view(shape)
        except RuntimeError:  # neighbours of an axis would not be apart by one stride
            return False
    found = zip(value.stride(), wanted, value.shape, strict=True)
    return all(stride == other for stride, other, size in found if size > 1)


def _layouts(type_: TensorType) -> tuple[str, ...]:
    return tuple(MEMORY_FORMATS) if len(type_.shape) == 4 else ("nchw",)


FAMILY = View()
