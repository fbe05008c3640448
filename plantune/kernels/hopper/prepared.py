"""What the Hopper convolutions prepare from weights, and how they hand it to a kernel."""

from __future__ import annotations

import ctypes

import torch

from plantune.graph.step import Step
from plantune.kernels.family import Frame
from plantune.kernels.hopper.launch import packed_weight
from plantune.kernels.patterns.epilogue import ConvEpilogue


class Scalars(ctypes.Structure):
    """plantune::ConvScalars."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("scale", "bias", "offset"))


class Prepared:
    """What follows from weights alone, packed when they change."""

    def __init__(self, step: Step, epilogue: ConvEpilogue, frame: Frame) -> None:
        self._epilogue, self._values = epilogue, frame.values
        self.weight = packed_weight(step, epilogue, frame.device)
        channels = self.weight.shape[0]
        self._scalars = {
            part: torch.empty(1 if part == "offset" else channels, device=frame.device)
            for part in ("scale", "bias", "offset")
            if getattr(epilogue, part) is not None
        }

    def refresh(self) -> None:
        self.weight.copy_(self._values[self._epilogue.conv.inputs[1]].permute(0, 2, 3, 1))
        for part, scalars in self._scalars.items():
            scalars.copy_(self._values[getattr(self._epilogue, part)].flatten())

    def addresses(self) -> dict[str, int]:
        return {part: scalars.data_ptr() for part, scalars in self._scalars.items()}

    def scalars(self) -> Scalars:
        return Scalars(**self.addresses())
