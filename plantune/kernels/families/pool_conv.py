"""Average pooling followed by a 1x1 convolution with bias, in one CUDA kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import ClassVar

from plantune.canonical import Attrs
from plantune.errors import IllegalCandidate
from plantune.graph.step import Step
from plantune.kernels.constants import ChannelValues, Parameter, in_rows
from plantune.kernels.cuda_family import CudaFamily
from plantune.kernels.family import Binding, Frame, images
from plantune.kernels.patterns.epilogue import ConvEpilogue
from plantune.kernels.patterns.pointwise_conv import pointwise_conv_behind
from plantune.kernels.vector_kernel import ELEMENTS
from plantune.kernels.warp_mma import (
    CHANNELS,
    ROWS,
    VALUES,
    TiledKernel,
    padded,
    why_not_elements,
)
from plantune.space.arch import Arch

VECTOR = 8
# Above it, a thread gets fewer registers than the pooling of one vector keeps under way.
THREADS_MAX = 512
PLACES_MAX = 64
SOURCE = """\
#include "cuda/pool_conv.h"

using T = {element};
using Pool = plantune::Pooling<plantune::Extent<{image}>, plantune::Extent<{kernel}>,
                               plantune::Extent<{stride}>, plantune::Extent<{padding}>, {count}>;
using Kernel =
    plantune::PoolConv<T, Pool, {channels}, {outputs}, plantune::PoolTile<{tile_m}, {tile_n}>,
                       {bias}>;
static_assert(Kernel::kSharedBytes == {shared_bytes}, "the launch asks for what the kernel uses");

extern "C" __global__ void __launch_bounds__(Kernel::kThreads)
run(const __grid_constant__ Kernel::Arguments arguments) {{
  Kernel::run(arguments);
}}
"""


class PoolConv(CudaFamily):
    """Config: output pixels `tile_m` and channels `tile_n` of a block."""

    name: ClassVar = "pool_conv"

    def why_not_step(self, step: Step) -> str | None:
        try:
            epilogue = _read(step)
        except IllegalCandidate as reason:
            return str(reason)
        channels, outputs = _channels(step)
        if channels % VECTOR or outputs % VECTOR:
            return f"channels move {VECTOR} at once, {channels} to {outputs} do not divide"
        places = step.nodes[0].attrs["kernel"]
        if places[0] * places[1] > PLACES_MAX:
            return f"a window of {places[0]}x{places[1]} is too much code, at most {PLACES_MAX}"
        if not 0 < _pixels(epilogue) < 1 << 30:
            return f"pixels are counted in 30 bits, got {_pixels(epilogue)}"
        return None

    def why_not_config(self, step: Step, config: Attrs, arch: Arch) -> str | None:
        outputs = _channels(step)[1]
        threads = self.threads(step, config)
        if threads > THREADS_MAX:
            return f"{threads} threads leave too few registers to each, at most {THREADS_MAX}"
        if config["tile_n"] >= padded(outputs, CHANNELS) + CHANNELS:
            return f"tile_n {config['tile_n']} has warps without any of the {outputs} channels"
        reason = why_not_elements(step.types[step.nodes[-1].name].dtype, arch)
        return reason or super().why_not_config(step, config, arch)

    def layouts(self, step: Step, config: Attrs) -> Mapping[str, str]:
        return images(step, "nhwc")

    def threads(self, step: Step, config: Attrs) -> int:
        return int(config["tile_m"]) // ROWS * int(config["tile_n"]) // CHANNELS * 32

    def shared_bytes(self, step: Step, config: Attrs) -> int:
        """The pooled pixels, each followed by a gap that spreads them over the banks."""
        values = padded(_channels(step)[0], 2 * VALUES)
        pitch = values + (32 if values % 64 == 0 else 0)
        return int(config["tile_m"]) * pitch * 2

    def source(self, step: Step, config: Attrs, arch: Arch) -> str:
        pool, type_ = step.nodes[0], step.types[step.nodes[-1].name]
        channels, outputs = _channels(step)
        extents = {name: _extent(pool.attrs[name]) for name in ("kernel", "stride", "padding")}
        return SOURCE.format(
            element=ELEMENTS[type_.dtype],
            image=_extent(step.types[pool.inputs[0]].shape[2:]),
            **extents,
            count=str(pool.attrs["count_padding"]).lower(),
            channels=channels,
            outputs=outputs,
            bias=str(_read(step).bias is not None).lower(),
            **config,
            shared_bytes=self.shared_bytes(step, config),
        )

    def bind(self, step: Step, config: Attrs, frame: Frame) -> Binding:
        epilogue, values = _read(step), frame.values
        x, y = step.nodes[0].inputs[0], step.nodes[-1].name
        outputs, pixels = _channels(step)[1], _pixels(epilogue)
        weight = in_rows(step, epilogue.conv.inputs[1], frame)
        name = epilogue.bias
        bias = None if name is None else ChannelValues(step, name, outputs, frame)
        kernel = TiledKernel(frame.built, config, pixels, outputs)
        threads, shared_bytes = self.threads(step, config), self.shared_bytes(step, config)

        def launch(stream: int) -> None:
            arguments = _Arguments(
                x=values[x].data_ptr(),
                weight=weight.tensor.data_ptr(),
                bias=Parameter() if bias is None else bias.parameter(),
                y=values[y].data_ptr(),
                pixels=pixels,
            )
            kernel.launch(stream, threads, (arguments,), shared_bytes)

        return Binding(launch, constants=(weight,) if bias is None else (weight, bias))


class _Arguments(ctypes.Structure):
    """PoolConv::Arguments."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", Parameter),
        ("y", ctypes.c_void_p),
        ("pixels", ctypes.c_int),
    )


def _read(step: Step) -> ConvEpilogue:
    """The convolution after an avg_pool2d; raises IllegalCandidate with the reason."""
    epilogue = pointwise_conv_behind(step, "avg_pool2d")
    if epilogue.relu or epilogue.offset is not None:
        raise IllegalCandidate("only a bias may follow the convolution")
    return epilogue


def _channels(step: Step) -> tuple[int, int]:
    """Of the image, and of the output."""
    return step.nodes[0].types[0].shape[1], step.types[step.nodes[-1].name].shape[1]


def _pixels(epilogue: ConvEpilogue) -> int:
    images_, _, rows, columns = epilogue.conv.types[0].shape
    return images_ * rows * columns


def _extent(sizes: tuple[int, ...]) -> str:
    return f"{sizes[0]}, {sizes[1]}"


FAMILY = PoolConv()
