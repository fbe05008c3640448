"""A reshape as a view: nothing is launched, no memory is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from plantune.canonical import Attrs
from plantune.graph.step import Step
from plantune.kernels.family import Binding, Frame, KernelFamily
from plantune.space.arch import Arch


class View(KernelFamily):
    name: ClassVar = "view"
    arch_kinds = frozenset(("cpu", "cuda"))

    def why_not_step(self, step: Step) -> str | None:
        return None if step.ops == ("reshape",) else "only a reshape is a view"

    def layouts(self, step: Step, config: Attrs) -> Mapping[str, str]:
        (source, _), (result, _) = step.inputs[0], step.outputs[0]
        return {source: "nchw", result: "nchw"}

    def aliases(self, step: Step, config: Attrs) -> Mapping[str, str]:
        return {step.outputs[0][0]: step.inputs[0][0]}

    def estimate_us_on(self, step: Step, config: Attrs, arch: Arch) -> float:
        """A guess must be above zero: what was measured is divided by it."""
        return self.estimate_us(step, config) if arch.cuda is None else 0.01

    def bind(self, step: Step, config: Attrs, frame: Frame) -> Binding:
        values = frame.values
        (source, _), (result, type_) = step.inputs[0], step.outputs[0]
        shape = type_.shape

        # A weight may have any strides.
        view = Tensor.reshape if source in step.constants else Tensor.view

        def launch(stream: int) -> None:
            values[result] = view(values[source], shape)

        return Binding(launch)


FAMILY = View()
