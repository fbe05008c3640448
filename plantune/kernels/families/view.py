"""A reshape, or a permute of axes, as a view: nothing is launched, no memory is used."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from plantune.canonical import Attrs
from plantune.graph.step import Step
from plantune.graph.types import TensorType
from plantune.kernels.family import Binding, Frame, KernelFamily, Parts
from plantune.kernels.legality import refuse
from plantune.layouts import MEMORY_FORMATS
from plantune.space.arch import Arch


@dataclass(frozen=True)
class ViewParts(Parts):
    """The layouts in which what is read and what is made are the same memory."""

    read: str = "nchw"
    made: str = "nchw"


class View(KernelFamily[ViewParts]):
    name: ClassVar = "view"
    arch_kinds = frozenset(("cpu", "cuda"))

    def read(self, step: Step) -> ViewParts:
        known = step.ops in (("reshape",), ("permute",))
        refuse({"only a reshape, or a permute, is a view": not known})
        if step.ops == ("reshape",):
            return ViewParts(step)
        source, _ = step.inputs[0]
        refuse({"a weight has no layout that may be asked for": source in step.constants})
        pairs = _layouts_of_permute(step)
        refuse({"the axes are in another order in memory, too": not pairs})
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
        (source, _), (result, type_) = step.inputs[0], step.outputs[0]
        permutes = step.ops == ("permute",)
        constant = source in step.constants
        dims: Any = step.nodes[0].attrs.get("dims")

        def launch(stream: int) -> None:
            value = values[source]
            # A weight may have any strides, and so may what torch made.
            made = value.permute(dims) if permutes else value.reshape(type_.shape)
            values[result] = made if permutes or constant else made.contiguous()

        return Binding(launch)


def _layouts_of_permute(step: Step) -> list[tuple[str, str]]:
    """The layouts of what is read and of what is made that need no element moved."""
    (_, x), (_, y), dims = step.inputs[0], step.outputs[0], step.nodes[0].attrs["dims"]
    pairs = itertools.product(_layouts(x), _layouts(y))

    def matters(strides: tuple[int, ...]) -> list[int]:
        return [stride for stride, size in zip(strides, y.shape, strict=True) if size > 1]

    return [
        (read, made)
        for read, made in pairs
        if matters(tuple(x.strides(read)[axis] for axis in dims)) == matters(y.strides(made))
    ]


def _layouts(type_: TensorType) -> tuple[str, ...]:
    return tuple(MEMORY_FORMATS) if len(type_.shape) == 4 else ("nchw",)


FAMILY = View()
