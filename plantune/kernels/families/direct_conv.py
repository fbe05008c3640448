"""Convolutions that read each weight once: `csrc/cpu/direct_conv.cpp`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from plantune.cuda.structs import fields
from plantune.graph import Step
from plantune.kernels.cxx import UnitFamily, function
from plantune.kernels.family import Arch, Attrs, Binding, Frame, refuse
from plantune.kernels.folded import Epilogue, Folded
from plantune.kernels.huge_pages import in_huge_pages
from plantune.kernels.patterns.epilogue import ConvParts, usual_parts
from plantune.kernels.patterns.expression import defined_function

FEW_CHANNELS, FEW_OUTPUTS = 16, 32


class Conv(ctypes.Structure):
    """The struct of that name in `csrc/cpu/direct_conv.cpp`."""

    _fields_ = fields(
        "count:int height:int width:int channels:int rows:int columns:int outputs:int "
        "kernel_height:int kernel_width:int stride_y:int stride_x:int top:int left:int "
        "dilation_y:int dilation_x:int"
    )


@dataclass(frozen=True)
class Built:
    run: Callable[..., None]
    width: int  # outputs of a panel of weights


class DirectConv(UnitFamily[ConvParts]):
    """Config: `layout`, which is nhwc: all channels of a pixel are read one after the other."""

    name: ClassVar = "direct_conv"
    unit: ClassVar = name

    def defined(self, parts: ConvParts) -> str:
        return defined_function(parts.epilogue.chain)

    def read(self, step: Step) -> ConvParts:
        parts = usual_parts(step)
        refuse(
            {
                f"it is written for float32, got {parts.dtype}": parts.dtype != "float32",
                "groups are other families'": parts.conv.attrs["groups"] != 1,
                "there are no images": 0 in step.types[parts.x].shape or not parts.pixels,
            }
        )
        return parts

    def can_be_guessed(self, parts: ConvParts, config: Attrs) -> bool:
        """Few channels are a short sum at each place, few outputs leave a panel half empty."""
        channels = parts.step.types[parts.x].shape[1]
        return channels >= FEW_CHANNELS and parts.outputs >= FEW_OUTPUTS

    def build(self, parts: ConvParts, config: Attrs, arch: Arch) -> Built:
        library, address = self.library(parts), ctypes.c_void_p
        ends = [ctypes.POINTER(Epilogue), address]
        run = function(library, self.unit, [ctypes.POINTER(Conv), address, address, *ends])
        return Built(run, getattr(library, f"{self.unit}_width")())

    def bind(self, parts: ConvParts, config: Attrs, frame: Frame) -> Binding:
        values, built, conv = frame.values, frame.built, _conv(parts)
        x, residual, y = parts.x, parts.epilogue.residual, values[parts.y]
        folded = Folded(parts.epilogue, values, lambda w: _panels(w, built.width), apart=True)

        def launch(stream: int) -> None:
            added = None if residual is None else values[residual].data_ptr()
            weight, end = folded.weight.data_ptr(), folded.after_sums(added)
            built.run(conv, values[x].data_ptr(), weight, end, y.data_ptr())

        return Binding(launch, folded.refresh)


def _conv(parts: ConvParts) -> Conv:
    attrs: Any = parts.conv.attrs
    count, channels, height, width = parts.step.types[parts.x].shape
    outputs, rows, columns = parts.conv.types[0].shape[1:]
    kernel = parts.step.types[parts.weight].shape[2:]
    geometry = (*attrs["stride"], *attrs["padding"], *attrs["dilation"])
    return Conv(count, height, width, channels, rows, columns, outputs, *kernel, *geometry)


def _panels(weight: Tensor, width: int) -> Tensor:
    """The weight as (panels, places of the kernel, channels, width), zeros after the last one."""
    outputs, channels, rows, columns = weight.shape
    panels = -(-outputs // width)
    packed = in_huge_pages(weight.new_empty(panels, rows * columns, channels, width))
    whole = torch.nn.functional.pad(weight, (0, 0, 0, 0, 0, 0, 0, panels * width - outputs))
    order = whole.view(panels, width, channels, rows * columns).permute(0, 3, 2, 1)
    return packed.copy_(order)


FAMILY = DirectConv()
