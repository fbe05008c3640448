"""What the Hopper convolutions read of weights, and how they hand it to a kernel."""

from __future__ import annotations

import ctypes

from torch import Tensor

from plantune.graph.step import Step
from plantune.kernels.constants import ChannelValues, Constant, Parameter, conv_weight
from plantune.kernels.family import Frame
from plantune.kernels.patterns.epilogue import ConvEpilogue


class Scalars(ctypes.Structure):
    """plantune::ConvScalars."""

    _fields_ = tuple((name, Parameter) for name in ("scale", "bias", "offset"))


class Prepared:
    """The weight as (O, R, S, C), and scale, bias and offset."""

    def __init__(self, step: Step, epilogue: ConvEpilogue, frame: Frame) -> None:
        weight = epilogue.conv.inputs[1]
        channels = step.types[weight].shape[0]
        self._weight = conv_weight(step, weight, frame)
        self._scalars = {
            part: ChannelValues(step, name, 1 if part == "offset" else channels, frame)
            for part in ("scale", "bias", "offset")
            if (name := getattr(epilogue, part)) is not None
        }

    @property
    def constants(self) -> tuple[Constant, ...]:
        return (self._weight, *self._scalars.values())

    def weight(self) -> Tensor:
        return self._weight.tensor

    def parameters(self) -> dict[str, Parameter]:
        return {part: scalar.parameter() for part, scalar in self._scalars.items()}

    def scalars(self) -> Scalars:
        return Scalars(**self.parameters())
