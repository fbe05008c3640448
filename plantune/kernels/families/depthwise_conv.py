"""Depthwise convolutions with what follows them: `csrc/cuda/depthwise_conv.h`."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from plantune.canonical import Attrs
from plantune.graph.step import Step
from plantune.kernels import vector_kernel
from plantune.kernels.constants import Constants, Form, Parameter
from plantune.kernels.cuda_family import CudaFamily
from plantune.kernels.family import Binding, Frame
from plantune.kernels.legality import first_reason, refuse
from plantune.kernels.patterns.epilogue import ConvParts, channel_parts, conv_epilogue
from plantune.kernels.patterns.expression import rendered
from plantune.kernels.rendering import cxx_bools
from plantune.space.arch import Arch

# Sums that a thread holds: more, with what it reads, do not fit into its registers.
SUMS_MAX = 64
FILTER_MAX = 11
SOURCE = (
    """#include "cuda/depthwise_conv.h"
{functors}struct Conv {{
  using T = {element};
  using Index = {index};
  using Expression = {expression};
  static constexpr int kH = {image[0]}, kW = {image[1]}, kP = {out[0]}, kQ = {out[1]};
  static constexpr int kC = {channels}, kR = {filter[0]}, kS = {filter[1]};
  static constexpr int kStrideH = {stride[0]}, kStrideW = {stride[1]};
  static constexpr int kPadH = {padding[0]}, kPadW = {padding[1]};
  static constexpr int kVector = {vector}, kRows = {rows}, kColumns = {columns};
  static constexpr int kThreads = {threads};
  static constexpr bool kScale = {scale}, kBias = {bias};
}};
using Kernel = plantune::DepthwiseConv<Conv>;"""
    + vector_kernel.ENTRIES
)


@dataclass(frozen=True)
class DepthwiseParts(ConvParts):
    """A convolution with one filter of each channel."""

    @property
    def image(self) -> tuple[int, ...]:
        return self.step.types[self.x].shape

    @property
    def filter(self) -> tuple[int, int]:
        rows, columns = self.step.types[self.weight].shape[2:]
        return rows, columns

    @property
    def vector(self) -> int:
        """Channels of a thread."""
        itemsize = self.step.types[self.x].torch_dtype.itemsize
        return math.gcd(vector_kernel.VECTOR_BYTES // itemsize, self.outputs)

    def tiles(self, config: Attrs) -> int:
        """The work of all threads."""
        images, _, rows, columns = self.conv.types[0].shape
        tiles = -(-rows // int(config["rows"])) * -(-columns // int(config["columns"]))
        return images * tiles * (self.outputs // self.vector)

    def read(self, config: Attrs) -> tuple[int, int]:
        """Rows and columns of the image that a tile reads."""
        strides, tile = self.conv.attrs["stride"], (config["rows"], config["columns"])
        rows, columns = (
            (int(size) - 1) * stride + taps
            for size, stride, taps in zip(tile, strides, self.filter, strict=True)
        )
        return rows, columns


class DepthwiseConv(CudaFamily[DepthwiseParts]):
    """Config: a thread makes so many `rows` and `columns` of pixels; `threads` of a block."""

    name: ClassVar = "depthwise_conv"
    image_layout = "nhwc"

    def read(self, step: Step) -> DepthwiseParts:
        parts = DepthwiseParts(step, conv_epilogue(step))
        attrs, channels = parts.conv.attrs, parts.image[1]
        each = attrs["groups"] == channels == parts.outputs
        refuse(
            {
                "only convolutions with one filter of each channel": not each,
                "only without dilation": attrs["dilation"] != (1, 1),
                f"filters of up to {FILTER_MAX} columns": max(parts.filter) > FILTER_MAX,
                **vector_kernel.not_an_element(parts.dtype),
                "there is nothing to compute": 0 in parts.conv.types[0].shape,
            }
        )
        return parts

    def why_not_config(self, parts: DepthwiseParts, config: Attrs, arch: Arch) -> str | None:
        _, _, rows, columns = parts.conv.types[0].shape
        sums = config["rows"] * config["columns"] * parts.vector
        return first_reason(
            {
                f"a thread has no room for {sums} sums": sums > SUMS_MAX,
                f"half of {config['rows']} rows hold all {rows}": config["rows"] >= 2 * rows,
                f"half of {config['columns']} columns hold all {columns}": config["columns"]
                >= 2 * columns,
            }
        )

    def source(self, parts: DepthwiseParts, config: Attrs, arch: Arch) -> str:
        elements = max(parts.step.types[parts.x].numel, parts.conv.types[0].numel)
        epilogue, attrs = parts.epilogue, parts.conv.attrs
        return SOURCE.format(
            element=vector_kernel.ELEMENTS[parts.dtype],
            index=vector_kernel.index_of(elements),
            image=parts.image[2:],
            out=parts.conv.types[0].shape[2:],
            channels=parts.outputs,
            filter=parts.filter,
            stride=attrs["stride"],
            padding=attrs["padding"],
            vector=parts.vector,
            **config,
            **cxx_bools({part: getattr(epilogue, part) for part in ("scale", "bias")}),
            **rendered(epilogue.chain),
        )

    def bind(self, parts: DepthwiseParts, config: Attrs, frame: Frame) -> Binding:
        values, tiles = frame.values, parts.tiles(config)
        constants = Constants(frame, _constants(parts))
        images = {"x": parts.x, "residual": parts.epilogue.residual, "y": parts.y}
        read = [name for name in (parts.x, parts.epilogue.residual) if name is not None]
        threads = int(config["threads"])
        kernel = vector_kernel.VectorKernel(frame.built, -(-tiles // threads), threads)

        def launch(stream: int) -> None:
            arguments = constants.into(_Arguments, images, count=tiles)
            kernel.launch(stream, arguments, [values[name] for name in read])

        return Binding(launch, constants=constants.all)

    def estimate_us(self, parts: DepthwiseParts, config: Attrs, arch: Arch) -> float:
        """Whatever takes longest: memory, the first-level caches, or multiplying."""
        cost, (rows, columns) = arch.cost(self.name), parts.read(config)
        loads = rows * columns + math.prod(parts.filter) * int(config["rows"])
        loaded = parts.tiles(config) * loads * parts.vector * _itemsize(parts)
        times = (
            parts.step.traffic_bytes / cost["bytes_per_us"],
            loaded / cost["loaded_bytes_per_us"],
            parts.step.flops / cost["flops_per_us"],
        )
        return cost["launch_us"] + max(times) * self.slowdown(parts, arch)


class _Arguments(ctypes.Structure):
    """plantune::DepthwiseConv::Arguments."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("x", "w", "residual", "y")),
        ("count", ctypes.c_longlong),
        *((name, Parameter) for name in ("scale", "bias", "offset")),
    ]


def _constants(parts: DepthwiseParts) -> Mapping[str, tuple[str | None, Form]]:
    """The filters by their taps, and numbers of each channel."""
    type_ = parts.step.types[parts.weight]
    shape = (*parts.filter, 1, parts.outputs)
    filters: Any = {"w": (parts.weight, Form(shape, type_.torch_dtype, _by_taps))}
    return {**filters, **channel_parts(parts.step, parts.epilogue)}


def _by_taps(weight: Tensor) -> Tensor:
    return weight.permute(2, 3, 1, 0)


def _itemsize(parts: DepthwiseParts) -> int:
    return parts.step.types[parts.x].torch_dtype.itemsize


FAMILY = DepthwiseConv()
