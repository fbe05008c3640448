"""What families share whose kernels multiply pixels with the panels of `csrc/cpu/panels.hpp`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from plantune.devices.cuda.structs import fields
from plantune.kernels.cpu.cxx import UnitFamily, function
from plantune.kernels.cpu.folded import Epilogue, Folded
from plantune.kernels.cpu.huge_pages import in_huge_pages
from plantune.kernels.family import Arch, Attrs, Binding, Frame, P, refuse
from plantune.kernels.patterns.epilogue import ConvParts
from plantune.kernels.patterns.expression import defined_function

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
    """`run` takes the sizes, the addresses of images and panels, the epilogue, and where to, then
    what the kernel takes beside. `width` is how many of so many outputs a panel has.
    """

    run: Callable[..., None]
    width: Callable[[int], int]


class DirectFamily(UnitFamily[P]):
    """A family whose kernel is a function of its unit."""

    unit: ClassVar = "direct_conv"
    # Types of what the kernel takes beside.
    more: ClassVar[tuple[Any, ...]] = ()

    def entry(self, parts: P) -> str:
        """The name of that function."""
        return self.unit

    def build(self, parts: P, config: Attrs, arch: Arch) -> Built:
        library, address = self.library(parts), ctypes.c_void_p
        ends = [ctypes.POINTER(Epilogue), address, *self.more]
        run = function(library, self.entry(parts), [ctypes.POINTER(Conv), address, address, *ends])
        return Built(run, getattr(library, f"{self.unit}_width"))


class DirectConvFamily(DirectFamily[ConvParts]):
    """A convolution, with or without something before it."""

    def defined(self, parts: ConvParts) -> str:
        return defined_function(parts.epilogue.chain)

    def bound(
        self,
        parts: ConvParts,
        frame: Frame,
        conv: Conv,
        filters: Callable[[Tensor], Tensor] | None = None,
        more: tuple[int, ...] = (),
    ) -> Binding:
        """A launch of the kernel. Its panels are made of what `filters` makes of the weight; `more`
        is what it takes beside.
        """
        values, built, epilogue = frame.values, frame.built, parts.epilogue
        width = built.width(parts.outputs)

        def pack(weight: Tensor) -> Tensor:
            return panels(weight if filters is None else filters(weight), width)

        folded = Folded(epilogue, values, pack, apart=True)
        y = values[parts.y]

        def address(name: str | None) -> int | None:
            return None if name is None else values[name].data_ptr()

        def launch(stream: int) -> None:
            end = folded.after_sums(address(epilogue.residual), address(epilogue.unshifted))
            built.run(conv, address(parts.x), folded.weight.data_ptr(), end, y.data_ptr(), *more)

        return Binding(launch, folded.refresh)


def require_fitting(parts: ConvParts) -> ConvParts:
    """The parts, if these kernels are for their dtype and sizes; else raises IllegalCandidate."""
    refuse(
        {
            f"it is written for float32, got {parts.dtype}": parts.dtype != "float32",
            "groups are other families'": parts.conv.attrs["groups"] != 1,
            "there are no images": 0 in parts.step.types[parts.x].shape or not parts.pixels,
        }
    )
    return parts


def sizes(parts: ConvParts, kernel: tuple[int, ...], attrs: Mapping[str, Any]) -> Conv:
    """With a kernel of that size, and the stride, padding and dilation among the attributes."""
    count, channels, height, width = parts.step.types[parts.x].shape
    outputs, rows, columns = parts.conv.types[0].shape[1:]
    geometry = (*attrs["stride"], *attrs["padding"], *attrs.get("dilation", (1, 1)))
    return Conv(count, height, width, channels, rows, columns, outputs, *kernel, *geometry)


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
