"""What families share whose kernel is `csrc/cpu/direct_conv.cpp`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from plantune.cuda.structs import fields
from plantune.kernels.cxx import UnitFamily, function
from plantune.kernels.family import Arch, Attrs, P
from plantune.kernels.folded import Epilogue
from plantune.kernels.huge_pages import in_huge_pages

# Of fewer, guesses leave a step to other families: few channels are a short sum at each place, few
# outputs leave most of a panel empty.
FEW_CHANNELS, FEW_OUTPUTS = 16, 32


class Conv(ctypes.Structure):
    """The struct of that name there."""

    _fields_ = fields(
        "count:int height:int width:int channels:int rows:int columns:int outputs:int "
        "kernel_height:int kernel_width:int stride_y:int stride_x:int top:int left:int "
        "dilation_y:int dilation_x:int"
    )


@dataclass(frozen=True)
class Built:
    """`run` takes the sizes, the addresses of images and panels, the epilogue, and where to."""

    run: Callable[..., None]
    width: int  # outputs of a panel of weights


class DirectFamily(UnitFamily[P]):
    """A family whose kernel it is."""

    unit: ClassVar = "direct_conv"

    def build(self, parts: P, config: Attrs, arch: Arch) -> Built:
        library, address = self.library(parts), ctypes.c_void_p
        ends = [ctypes.POINTER(Epilogue), address]
        run = function(library, self.unit, [ctypes.POINTER(Conv), address, address, *ends])
        return Built(run, getattr(library, f"{self.unit}_width")())


def panels(weight: Tensor, width: int) -> Tensor:
    """The weight as (panels, places of the kernel, channels, width), zeros after the last one."""
    outputs, channels, rows, columns = weight.shape
    count = -(-outputs // width)
    packed = in_huge_pages(weight.new_empty(count, rows * columns, channels, width))
    packed[-1].zero_()
    # By output: a panel's outputs stand side by side.
    by_output = packed.permute(0, 3, 2, 1)
    filters = weight.reshape(outputs, channels, rows * columns)
    whole = outputs // width
    by_output[:whole] = filters[: whole * width].view(whole, width, channels, rows * columns)
    if whole < count:
        by_output[whole, : outputs - whole * width] = filters[whole * width :]
    return packed


def is_large(channels: int, outputs: int) -> bool:
    """Whether guesses take these families for it."""
    return channels >= FEW_CHANNELS and outputs >= FEW_OUTPUTS
