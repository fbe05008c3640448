"""Average pooling, then a 1x1 convolution with bias and functions, in one CUDA kernel."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import ClassVar

from plantune.devices.cuda.structs import fields
from plantune.graph import Node, Step
from plantune.kernels.cuda import warp_mma
from plantune.kernels.cuda.vector_kernel import ELEMENTS
from plantune.kernels.family import Arch, Attrs, Binding, Frame, refuse
from plantune.kernels.patterns.epilogue import channel_parts
from plantune.kernels.patterns.expression import rendered
from plantune.kernels.patterns.pointwise_conv import pointwise_conv_after
from plantune.kernels.rendering import cxx_bool, cxx_bools
from plantune.kernels.weights.constants import Constants, Parameter, in_rows

VECTOR = 8
# Above it, a thread gets fewer registers than the pooling of one vector keeps under way.
THREADS_MAX = 512
PLACES_MAX = 64
SOURCE = (
    """\
#include "cuda/pool_conv.h"

{functors}using T = {element};
using Pool = plantune::Pooling<plantune::Extent<{image}>, plantune::Extent<{kernel}>,
                               plantune::Extent<{stride}>, plantune::Extent<{padding}>, {count}>;
using Kernel =
    plantune::PoolConv<T, Pool, {channels}, {outputs}, plantune::PoolTile<{tile_m}, {tile_n}>,
                       {bias}, {keeps}, {expression}>;
"""
    + warp_mma.ENTRY
)


@dataclass(frozen=True)
class PoolConvParts(warp_mma.TiledParts):
    """An average pool, and the 1x1 convolution after it."""

    @property
    def pool(self) -> Node:
        return self.step.nodes[0]

    @property
    def channels(self) -> int:
        """Channels of the image."""
        return self.pool.types[0].shape[1]

    @property
    def kept(self) -> str | None:
        """The pooled image, if that leaves too."""
        name = self.pool.name
        return name if name in dict(self.step.outputs) else None

    def shared_bytes(self, config: Attrs) -> int:
        """The pooled pixels, each followed by a gap that spreads them over the banks."""
        values = warp_mma.padded(self.channels, 2 * warp_mma.VALUES)
        pitch = values + (32 if values % 64 == 0 else 0)
        return int(config["tile_m"]) * pitch * 2


class PoolConv(warp_mma.TiledFamily[PoolConvParts]):
    """Config: output pixels `tile_m` and channels `tile_n` of a block.

    The pooled image may leave too, as training keeps it.
    """

    name: ClassVar = "pool_conv"
    image_layout = "nhwc"

    def read(self, step: Step) -> PoolConvParts:
        parts = PoolConvParts(step, pointwise_conv_after(step, "avg_pool2d", kept=True))
        epilogue, channels, outputs = parts.epilogue, parts.channels, parts.outputs
        rows, columns = parts.pool.attrs["kernel"]
        odd = channels % VECTOR or outputs % VECTOR
        window = f"a window of {rows}x{columns} is too much code, at most {PLACES_MAX}"
        refuse(
            {
                "only a bias and functions may follow the convolution": epilogue.offset,
                f"channels move {VECTOR} at once, {channels} to {outputs} do not divide": odd,
                window: rows * columns > PLACES_MAX,
                **warp_mma.not_countable(parts.pixels),
            }
        )
        return parts

    def why_not_config(self, parts: PoolConvParts, config: Attrs, arch: Arch) -> str | None:
        threads = self.threads(parts, config)
        if threads > THREADS_MAX:
            return f"{threads} threads leave too few registers to each, at most {THREADS_MAX}"
        return super().why_not_config(parts, config, arch)

    def threads(self, parts: PoolConvParts, config: Attrs) -> int:
        return (
            int(config["tile_m"]) // warp_mma.ROWS * int(config["tile_n"]) // warp_mma.CHANNELS * 32
        )

    def source(self, parts: PoolConvParts, config: Attrs, arch: Arch) -> str:
        pool = parts.pool
        extents = {name: _extent(pool.attrs[name]) for name in ("kernel", "stride", "padding")}
        return SOURCE.format(
            element=ELEMENTS[parts.dtype],
            image=_extent(parts.step.types[parts.x].shape[2:]),
            **extents,
            count=cxx_bool(pool.attrs["count_padding"]),
            channels=parts.channels,
            outputs=parts.outputs,
            **cxx_bools({"bias": parts.epilogue.bias, "keeps": parts.kept}),
            **rendered(parts.epilogue.chain),
            **config,
            shared_bytes=parts.shared_bytes(config),
        )

    def bind(self, parts: PoolConvParts, config: Attrs, frame: Frame) -> Binding:
        weight = {"weight": (parts.weight, in_rows(parts.step.types[parts.weight]))}
        constants = Constants(frame, weight | channel_parts(parts.step, parts.epilogue))
        kernel = self.launcher(parts, config, frame)
        images = {"x": parts.x, "y": parts.y, "kept": parts.kept or parts.y}

        def launch(stream: int) -> None:
            kernel.launch(stream, constants.into(_Arguments, images, pixels=parts.pixels))

        return Binding(launch, constants=constants.all)


class _Arguments(ctypes.Structure):
    """PoolConv::Arguments."""

    _fields_ = fields("x weight bias:one y kept pixels:int", one=Parameter)


def _extent(sizes: tuple[int, ...]) -> str:
    return f"{sizes[0]}, {sizes[1]}"


FAMILY = PoolConv()
