"""Depthwise convolutions with what follows them: `csrc/cuda/depthwise_conv.h`."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from plantune.kernels.cuda import vector_kernel
from plantune.kernels.cuda.cuda_family import Arch, Attrs, CudaFamily, Step, first_reason, refuse
from plantune.kernels.family import Binding, Frame
from plantune.kernels.patterns.epilogue import channel_parts, conv_epilogue
from plantune.kernels.patterns.tiled_conv import TiledConv, arguments
from plantune.kernels.weights.constants import Arrangement

# Sums that a thread holds: more, with what it reads, do not fit into its registers.
SUMS_MAX = 64
FILTER_MAX = 11


@dataclass(frozen=True)
class DepthwiseParts(TiledConv):
    """A convolution with one filter of each channel."""

    @property
    def image(self) -> tuple[int, ...]:
        return self.step.types[self.x].shape

    @property
    def vector(self) -> int:
        """Channels of a thread."""
        return math.gcd(vector_kernel.width(self.step.types[self.x]), self.outputs)

    def work(self, config: Attrs) -> int:
        """Work items: each thread takes a tile of a vector of channels."""
        return self.tiles(config) * (self.outputs // self.vector)


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
        sums = config["rows"] * config["columns"] * parts.vector
        return first_reason(
            {
                f"a thread has no room for {sums} sums": sums > SUMS_MAX,
                **parts.too_large(config),
            }
        )

    def source(self, parts: DepthwiseParts, config: Attrs, arch: Arch) -> str:
        elements = max(parts.step.types[parts.x].numel, parts.conv.types[0].numel)
        conv = parts.struct(
            config,
            Index=vector_kernel.index_of(elements),
            kC=parts.outputs,
            kVector=parts.vector,
            kRows=config["rows"],
            kColumns=config["columns"],
        )
        return vector_kernel.source(self.name, "DepthwiseConv<Conv>", config["threads"], conv)

    def bind(self, parts: DepthwiseParts, config: Attrs, frame: Frame) -> Binding:
        work, threads = parts.work(config), int(config["threads"])
        kernel = vector_kernel.VectorKernel(frame.built, -(-work // threads), threads)
        return parts.bind(frame, kernel, _Arguments, _constants(parts), count=work)

    def estimate_us(self, parts: DepthwiseParts, config: Attrs, arch: Arch) -> float:
        """Whatever takes longest: memory, the first-level caches, or multiplying."""
        cost, (rows, columns) = arch.cost(self.name), parts.read(config)
        loads = rows * columns + math.prod(parts.filter) * int(config["rows"])
        loaded = parts.work(config) * loads * parts.vector * _itemsize(parts)
        times = (
            parts.step.traffic_bytes / cost["bytes_per_us"],
            loaded / cost["loaded_bytes_per_us"],
            parts.step.flops / cost["flops_per_us"],
        )
        return cost["launch_us"] + max(times) * self.slowdown(parts, arch)


class _Arguments(ctypes.Structure):
    """plantune::DepthwiseConv::Arguments."""

    _fields_ = arguments("count:longlong")


def _constants(parts: DepthwiseParts) -> Mapping[str, tuple[str | None, Arrangement]]:
    """The filters by their taps, and numbers of each channel."""
    type_ = parts.step.types[parts.weight]
    shape = (*parts.filter, 1, parts.outputs)
    filters: Any = {"w": (parts.weight, Arrangement(shape, type_.torch_dtype, _by_taps))}
    return {**filters, **channel_parts(parts.step, parts.epilogue)}


def _by_taps(weight: Tensor) -> Tensor:
    return weight.permute(2, 3, 1, 0)


def _itemsize(parts: DepthwiseParts) -> int:
    return parts.step.types[parts.x].torch_dtype.itemsize


FAMILY = DepthwiseConv()
