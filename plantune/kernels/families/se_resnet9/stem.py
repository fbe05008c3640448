"""Cast, scale, SpaceToDepth(4), 1x1 convolution and what follows it in one CUDA kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from plantune.devices.cuda.structs import fields
from plantune.graph import Step, TensorType
from plantune.graph.types import DTYPES
from plantune.kernels.cuda.vector_kernel import ELEMENTS, not_an_element
from plantune.kernels.cuda.warp_mma import ENTRY, ROWS, TiledFamily, TiledParts, not_countable
from plantune.kernels.family import Arch, Attrs, Binding, Frame, images, refuse
from plantune.kernels.legality import not_of
from plantune.kernels.patterns.channel_affine import ChannelAffine, ChannelScales, channel_affine_of
from plantune.kernels.patterns.expression import rendered
from plantune.kernels.patterns.pointwise_conv import pointwise_conv_after
from plantune.kernels.rendering import cxx_bools
from plantune.kernels.weights.constants import Constants, in_rows

BLOCK = 4
AT_ONCE = 8
# Bytes of patches in a lane's registers, by Stem::kWhole.
PATCH_BYTES = 64
# The dtypes that images may have.
PIXELS = {**ELEMENTS, "uint8": "unsigned char"}
SOURCE = (
    """\
#include "cuda/se_resnet9/stem.h"

{functors}using T = {element};
using Pixels = plantune::StemPixels<{pixel}, {scaled}>;
using Kernel = plantune::Stem<T, Pixels, plantune::ImageShape<{c}, {h}, {w}>, {outputs},
                              plantune::StemTile<{tile_m}, {tile_n}, {warp_m}>,
                              plantune::StemEnd<plantune::Bias::{bias}, {expression},
                                                {plain}, {moved}, plantune::Types<{types}>>>;
"""
    + ENTRY
)


@dataclass(frozen=True)
class StemParts(TiledParts):
    """A step as the kernel takes it: what it reads, what becomes of that, and the convolution."""

    affine: ChannelAffine

    @property
    def image(self) -> TensorType:
        return self.step.types[self.affine.source]

    @property
    def bias(self) -> str:
        """Which values it has, in the header's words."""
        if self.epilogue.bias is None:
            return "kNone"
        return "kOne" if self.step.types[self.epilogue.bias].numel == 1 else "kEach"

    @property
    def types(self) -> str:
        """The element types of bias, offset, y and the value before the offset, in C++."""
        epilogue = self.epilogue
        named = (epilogue.bias, epilogue.offset, self.y, epilogue.unshifted)
        return ", ".join(ELEMENTS[self.step.types[name or self.y].dtype] for name in named)

    @property
    def moved(self) -> str | None:
        """What space_to_depth makes, if that leaves too."""
        name = self.step.nodes[len(self.affine.nodes)].name
        return name if name in dict(self.step.outputs) else None

    def shared_bytes(self, config: Attrs) -> int:
        """The weights of the block's channels, as StemWeights lays them out, and patches."""
        channels = self.image.shape[1]
        row = channels * BLOCK + (8 if channels % 4 == 0 else 0)
        patches = int(config["tile_m"]) * channels * BLOCK * BLOCK * 2 if self.moved else 0
        return int(config["tile_n"]) * (row * BLOCK * 2 + 8) + patches


class Stem(TiledFamily[StemParts]):
    """Config: output pixels `tile_m` and channels `tile_n` of a block, pixels `warp_m` of a warp.

    The image is read as it comes, in nchw and of any dtype that a cast takes; what leaves is nhwc.
    The value before the offset may leave too, and what space_to_depth makes.
    """

    name: ClassVar = "stem"
    mixes_types: ClassVar = True

    def read(self, step: Step) -> StemParts:
        """The convolution after a space_to_depth."""
        affine = channel_affine_of(step)
        first = len(affine.nodes)
        epilogue = pointwise_conv_after(
            step, "space_to_depth", skipped=first, unshifted=True, kept=True
        )
        parts, moved = StemParts(step, epilogue, affine), step.nodes[first]
        block, dtype, outputs = moved.attrs["block"], parts.image.dtype, parts.outputs
        others = (epilogue.bias, epilogue.offset, parts.y, epilogue.unshifted)
        elsewhere = f"{moved.name!r} does not read {affine.result!r}, which is before it"
        refuse(
            {
                elsewhere: moved.inputs[0] != affine.result,
                f"patches are {BLOCK}x{BLOCK}, got {block}": block != BLOCK,
                f"the kernel reads {', '.join(PIXELS)}, got {dtype}": dtype not in PIXELS,
                **not_an_element(*(step.types[name].dtype for name in others if name)),
                **not_of(step, parts.dtype, parts.moved),
                f"a lane writes {AT_ONCE} channels at once, {outputs} do not divide": outputs
                % AT_ONCE,
                **not_countable(parts.pixels),
            }
        )
        return parts

    def layouts(self, parts: StemParts, config: Attrs) -> Mapping[str, str]:
        return {**images(parts.step, "nhwc"), parts.x: "nchw"}

    def why_not_config(self, parts: StemParts, config: Attrs, arch: Arch) -> str | None:
        channels, itemsize = parts.image.shape[1], parts.image.torch_dtype.itemsize
        products = (
            int(config["warp_m"]) // ROWS * (4 if arch.gpu.compute_capability < (7, 5) else 2)
        )
        if parts.moved and products * channels * itemsize > PATCH_BYTES:
            return f"a lane has no room for patches of {channels} channels"
        return super().why_not_config(parts, config, arch)

    def threads(self, parts: StemParts, config: Attrs) -> int:
        return int(config["tile_m"]) // int(config["warp_m"]) * 32

    def source(self, parts: StemParts, config: Attrs, arch: Arch) -> str:
        _, c, h, w = parts.image.shape
        plain, moved = parts.epilogue.unshifted, parts.moved
        flags = {"scaled": parts.affine.scales, "plain": plain, "moved": moved}
        return SOURCE.format(
            element=ELEMENTS[parts.dtype],
            pixel=PIXELS[parts.image.dtype],
            **{"c": c, "h": h, "w": w, "outputs": parts.outputs},
            **config,
            bias=parts.bias,
            types=parts.types,
            **cxx_bools(flags),
            **rendered(parts.epilogue.chain),
            shared_bytes=parts.shared_bytes(config),
        )

    def bind(self, parts: StemParts, config: Attrs, frame: Frame) -> Binding:
        epilogue, types = parts.epilogue, parts.step.types
        named = {"weight": parts.weight, "bias": epilogue.bias, "offset": epilogue.offset}
        read = {word: (name, in_rows(types[name])) for word, name in named.items() if name}
        weight = replace(read["weight"][1], dtype=DTYPES[parts.dtype])
        read["weight"] = (parts.weight, weight)
        constants = Constants(frame, read)
        scales = ChannelScales(parts.affine, parts.image.shape[1], frame)
        kernel = self.launcher(parts, config, frame)
        images = {
            "x": parts.x,
            "y": parts.y,
            "plain": epilogue.unshifted or parts.y,
            "moved": parts.moved or parts.y,
        }

        def launch(stream: int) -> None:
            table = scales.tensor.data_ptr()
            kernel.launch(
                stream, constants.into(_Arguments, images, scales=table, pixels=parts.pixels)
            )

        return Binding(launch, constants=(*constants.all, *scales.constants))

    def estimate_us(self, parts: StemParts, config: Attrs, arch: Arch) -> float:
        """What passes through memory, and the image again for each tile of outputs."""
        cost = arch.cost(self.name)
        _, tiles = parts.blocks(config)
        loading_us = parts.image.size_bytes * tiles / cost["loaded_bytes_per_us"]
        moving_us = parts.step.traffic_bytes / cost["bytes_per_us"]
        return cost["launch_us"] + (loading_us + moving_us) * self.slowdown(parts, arch)


class _Arguments(ctypes.Structure):
    """Stem::Arguments."""

    _fields_ = fields("x weight bias offset scales y plain moved pixels:int")


FAMILY = Stem()
