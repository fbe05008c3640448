"""A reshape as a view: nothing is launched, no memory is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from plantune.canonical import Attrs
from plantune.graph.step import Step
from plantune.kernels.family import Binding, Frame, KernelFamily, Parts
from plantune.kernels.legality import refuse
from plantune.space.arch import Arch


class View(KernelFamily[Parts]):
    name: ClassVar = "view"
    arch_kinds = frozenset(("cpu", "cuda"))

    def read(self, step: Step) -> Parts:
        refuse({"only a reshape is a view": step.ops != ("reshape",)})
        return Parts(step)

    def layouts(self, parts: Parts, config: Attrs) -> Mapping[str, str]:
        (source, _), (result, _) = parts.step.inputs[0], parts.step.outputs[0]
        return {source: "nchw", result: "nchw"}

    def aliases(self, parts: Parts, config: Attrs) -> Mapping[str, str]:
        return {parts.step.outputs[0][0]: parts.step.inputs[0][0]}

    def estimate_us(self, parts: Parts, config: Attrs, arch: Arch) -> float:
        """A guess must be above zero: what was measured is divided by it."""
        return super().estimate_us(parts, config, arch) if arch.cuda is None else 0.01

    def bind(self, parts: Parts, config: Attrs, frame: Frame) -> Binding:
        step, values = parts.step, frame.values
        (source, _), (result, type_) = step.inputs[0], step.outputs[0]
        shape = type_.shape

        # A weight may have any strides.
        view = Tensor.reshape if source in step.constants else Tensor.view

        def launch(stream: int) -> None:
            values[result] = view(values[source], shape)

        return Binding(launch)


FAMILY = View()
