"""Depthwise convolutions with what follows them: `csrc/cuda/depthwise_conv.h`."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from plantune.kernels.cuda import vector_kernel
from plantune.kernels.cuda.cuda_family import Arch, Attrs, CudaFamily, Step, first_reason, refuse
from plantune.kernels.family import Binding, Frame
from plantune.kernels.patterns.epilogue import channel_parts, conv_epilogue
from plantune.kernels.patterns.other_step import OtherStep
from plantune.kernels.patterns.tiled_conv import TiledConv, arguments
from plantune.kernels.weights.constants import Arrangement

# Sums that a thread holds: more, with what it reads, do not fit into its registers.
SUMS_MAX = 64
# From so many rows on a thread finishes each as it goes down, and holds its filters beside what it
# sums and reads.
SLIDES_FROM, HELD_MAX, READ_MAX = 8, 96, 9
THREADS_MAX = 128
NARROWEST_BYTES = 4  # of a vector: neighbours read less than a sector otherwise
FILTER_MAX = 11


@dataclass(frozen=True)
class DepthwiseParts(TiledConv):
    """A convolution with one filter of each channel; of an image's gradient it is turned round."""

    turned: bool = False

    @property
    def image(self) -> tuple[int, ...]:
        return self.step.types[self.x].shape

    def slides(self, config: Attrs) -> bool:
        return int(config["rows"]) >= SLIDES_FROM

    def held(self, config: Attrs) -> int:
        """Sums, and taps of filters, that a thread holds of each channel."""
        rows, columns = int(config["rows"]), int(config["columns"])
        if not self.slides(config):
            return rows * columns
        stride: Any = self.conv.attrs["stride"]
        live: int = min(rows, -(-self.filter[0] // stride[0]))
        return live * columns + math.prod(self.filter)

    def vector(self, config: Attrs) -> int:
        """Channels of a thread: as many as words and registers have room for."""
        most = math.gcd(vector_kernel.width(self.step.types[self.x]), self.outputs)
        while self.slides(config) and most > 1 and most * self.held(config) > HELD_MAX:
            most //= 2
        return most

    def work(self, config: Attrs) -> int:
        """Work items: each thread takes a tile of a vector of channels."""
        return self.tiles(config) * (self.outputs // self.vector(config))


class DepthwiseConv(CudaFamily[DepthwiseParts]):
    """Config: a thread makes so many `rows` and `columns` of pixels; `threads` of a block."""

    name: ClassVar = "depthwise_conv"
    image_layout = "nhwc"

    def read(self, step: Step) -> DepthwiseParts:
        turned = step.ops[0] == "conv2d_dgrad"
        step = _of_gradient(step) if turned else step
        parts = DepthwiseParts(step, conv_epilogue(step), turned)
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
        vector, slides = parts.vector(config), parts.slides(config)
        held = parts.held(config) * vector
        wide = slides and parts.read(config)[1] > READ_MAX
        thin = slides and 2 * config["columns"] < parts.filter[1]
        narrow = slides and vector * _itemsize(parts) < NARROWEST_BYTES
        return first_reason(
            {
                f"a thread has no room for {held} sums": held > (HELD_MAX if slides else SUMS_MAX),
                f"blocks of {config['threads']} threads leave registers idle": slides
                and config["threads"] > THREADS_MAX,
                f"of {config['columns']} columns a thread reads too much beside": thin,
                f"a thread has no room for {parts.read(config)[1]} columns": wide,
                "threads would read less than a sector side by side": narrow,
                **parts.too_large(config),
            }
        )

    def source(self, parts: DepthwiseParts, config: Attrs, arch: Arch) -> str:
        elements = max(parts.step.types[parts.x].numel, parts.conv.types[0].numel)
        conv = parts.struct(
            config,
            Index=vector_kernel.index_of(elements),
            kC=parts.outputs,
            kVector=parts.vector(config),
            kSlides=parts.slides(config),
            kRows=config["rows"],
            kColumns=config["columns"],
        )
        return vector_kernel.source(self.name, "DepthwiseConv<Conv>", config["threads"], conv)

    def bind(self, parts: DepthwiseParts, config: Attrs, frame: Frame) -> Binding:
        work, threads = parts.work(config), int(config["threads"])
        kernel = vector_kernel.VectorKernel(frame.built, -(-work // threads), threads)
        return parts.bind(frame, kernel, _Arguments, _constants(parts), count=work)

    def estimate_us(self, parts: DepthwiseParts, config: Attrs, arch: Arch) -> float:
        """Memory, the first-level caches, multiplying, and rows that a thread takes one by one."""
        cost, (rows, columns) = arch.cost(self.name), parts.read(config)
        taps = math.prod(parts.filter) * (1 if parts.slides(config) else int(config["rows"]))
        loads = rows * columns + taps
        loaded = parts.work(config) * loads * parts.vector(config) * _itemsize(parts)
        work = (
            parts.step.traffic_bytes / cost["bytes_per_us"]
            + loaded / cost["loaded_bytes_per_us"]
            + parts.step.flops / cost["flops_per_us"]
        )
        return cost["launch_us"] + rows * cost["row_us"] + work * self.slowdown(parts, arch)


class _Arguments(ctypes.Structure):
    """plantune::DepthwiseConv::Arguments."""

    _fields_ = arguments("count:longlong")


def _constants(parts: DepthwiseParts) -> Mapping[str, tuple[str | None, Arrangement]]:
    """The filters by their taps, and numbers of each channel."""
    type_ = parts.step.types[parts.weight]
    shape = (*parts.filter, 1, parts.outputs)
    order = _by_taps_turned if parts.turned else _by_taps
    arrangement = Arrangement(shape, type_.torch_dtype, order, packs=parts.turned)
    filters: Any = {"w": (parts.weight, arrangement)}
    return {**filters, **channel_parts(parts.step, parts.epilogue)}


def _by_taps(weight: Tensor) -> Tensor:
    return weight.permute(2, 3, 1, 0)


def _by_taps_turned(weight: Tensor) -> Tensor:
    return _by_taps(weight).flip(0, 1)


def _of_gradient(step: Step) -> Step:
    """The gradient of an image as a convolution of what came back, with the filter turned round."""
    first = step.nodes[0]
    attrs: Any = first.attrs
    taps = step.types[first.inputs[1]].shape[2:]
    padding = tuple(size - 1 - pad for size, pad in zip(taps, attrs["padding"], strict=True))
    refuse(
        {
            "only gradients of convolutions without strides": attrs["stride"] != (1, 1),
            f"the padding {attrs['padding']} is not smaller than the filter": min(padding) < 0,
        }
    )
    geometry = {name: attrs[name] for name in ("stride", "dilation", "groups")}
    conv = replace(first, op="conv2d", attrs=Attrs(geometry, padding=padding))
    return OtherStep.of(step, nodes=(conv, *step.nodes[1:]))


def _itemsize(parts: DepthwiseParts) -> int:
    return parts.step.types[parts.x].torch_dtype.itemsize


FAMILY = DepthwiseConv()
