"""Cast, scale, SpaceToDepth(4), 1x1 convolution, bias, ReLU and offset in one CUDA kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from plantune.canonical import Attrs
from plantune.errors import IllegalCandidate
from plantune.graph.step import Step
from plantune.graph.types import TensorType
from plantune.kernels.constants import in_rows
from plantune.kernels.cuda_family import CudaFamily
from plantune.kernels.family import Binding, Frame, images
from plantune.kernels.patterns.channel_affine import (
    ChannelAffine,
    ChannelScales,
    channel_affine_of,
)
from plantune.kernels.patterns.epilogue import ConvEpilogue
from plantune.kernels.patterns.pointwise_conv import pointwise_conv_behind
from plantune.kernels.vector_kernel import ELEMENTS
from plantune.kernels.warp_mma import CHANNELS, TiledKernel, padded, why_not_elements
from plantune.space.arch import Arch

BLOCK = 4
OUTPUTS_AT_ONCE = 8
# What the images may hold.
PIXELS = {**ELEMENTS, "uint8": "unsigned char"}
SOURCE = """\
#include "cuda/se_resnet9/stem.h"

using T = {element};
using Pixels = plantune::StemPixels<{pixel}, {scaled}>;
using Kernel = plantune::Stem<T, Pixels, plantune::ImageShape<{c}, {h}, {w}>, {outputs},
                              plantune::StemTile<{tile_m}, {tile_n}, {warp_m}>,
                              plantune::StemEnd<plantune::Bias::{bias}, {relu}, {offset}, {plain}>>;
static_assert(Kernel::kSharedBytes == {shared_bytes}, "the launch asks for what the kernel uses");

extern "C" __global__ void __launch_bounds__(Kernel::kThreads)
run(const __grid_constant__ Kernel::Arguments arguments) {{
  Kernel::run(arguments);
}}
"""


class Stem(CudaFamily):
    """Config: output pixels `tile_m` and channels `tile_n` of a block, pixels `warp_m` of a warp.

    The image is read as it comes, in nchw and of any dtype that a cast takes; what leaves is nhwc.
    The value before the offset may leave, too.
    """

    name: ClassVar = "stem"

    def why_not_step(self, step: Step) -> str | None:
        try:
            parts = _read(step)
        except IllegalCandidate as reason:
            return str(reason)
        if parts.image.dtype not in PIXELS:
            return f"the kernel reads {', '.join(PIXELS)}, got {parts.image.dtype}"
        if parts.outputs % OUTPUTS_AT_ONCE:
            return (
                f"a lane writes {OUTPUTS_AT_ONCE} channels at once, {parts.outputs} do not divide"
            )
        if not 0 < parts.pixels < 1 << 30:
            return f"pixels are counted in 30 bits, got {parts.pixels}"
        return None

    def why_not_config(self, step: Step, config: Attrs, arch: Arch) -> str | None:
        parts = _read(step)
        if config["tile_n"] >= padded(parts.outputs, CHANNELS) + CHANNELS:
            return (
                f"tile_n {config['tile_n']} has warps without any of the {parts.outputs} channels"
            )
        reason = why_not_elements(parts.epilogue.conv.types[0].dtype, arch)
        return reason or super().why_not_config(step, config, arch)

    def layouts(self, step: Step, config: Attrs) -> Mapping[str, str]:
        return {**images(step, "nhwc"), _read(step).affine.source: "nchw"}

    def threads(self, step: Step, config: Attrs) -> int:
        return int(config["tile_m"]) // int(config["warp_m"]) * 32

    def shared_bytes(self, step: Step, config: Attrs) -> int:
        """The weights of the block's channels, as StemWeights lays them out."""
        channels = _read(step).image.shape[1]
        row = channels * BLOCK + (8 if channels % 4 == 0 else 0)
        return int(config["tile_n"]) * (row * BLOCK * 2 + 8)

    def source(self, step: Step, config: Attrs, arch: Arch) -> str:
        parts = _read(step)
        _, c, h, w = parts.image.shape
        return SOURCE.format(
            element=ELEMENTS[parts.epilogue.conv.types[0].dtype],
            pixel=PIXELS[parts.image.dtype],
            scaled=str(parts.affine.scales).lower(),
            **{"c": c, "h": h, "w": w, "outputs": parts.outputs},
            **config,
            bias=parts.bias,
            relu=str(parts.epilogue.relu).lower(),
            offset=str(parts.epilogue.offset is not None).lower(),
            plain=str(parts.epilogue.unshifted is not None).lower(),
            shared_bytes=self.shared_bytes(step, config),
        )

    def bind(self, step: Step, config: Attrs, frame: Frame) -> Binding:
        parts, values = _read(step), frame.values
        epilogue, outputs = parts.epilogue, parts.outputs
        x, y = parts.affine.source, step.nodes[-1].name
        plain = epilogue.unshifted or y
        weight = in_rows(step, epilogue.conv.inputs[1], frame)
        named = {"bias": epilogue.bias, "offset": epilogue.offset}
        vectors = {part: in_rows(step, n, frame) for part, n in named.items() if n is not None}
        scales = ChannelScales(parts.affine, parts.image.shape[1], frame)
        kernel = TiledKernel(frame.built, config, parts.pixels, outputs)
        threads, shared_bytes = self.threads(step, config), self.shared_bytes(step, config)

        def launch(stream: int) -> None:
            places = {
                "x": values[x],
                "weight": weight.tensor,
                **{part: vector.tensor for part, vector in vectors.items()},
                "scales": scales.tensor,
                "y": values[y],
                "plain": values[plain],
            }
            addresses = {part: tensor.data_ptr() for part, tensor in places.items()}
            arguments = _Arguments(**addresses, pixels=parts.pixels)
            kernel.launch(stream, threads, (arguments,), shared_bytes)

        return Binding(launch, constants=(weight, *vectors.values(), *scales.constants))


class _Arguments(ctypes.Structure):
    """Stem::Arguments."""

    _fields_ = (
        *((part, ctypes.c_void_p) for part in ("x", "weight", "bias", "offset", "scales")),
        *((part, ctypes.c_void_p) for part in ("y", "plain")),
        ("pixels", ctypes.c_int),
    )


@dataclass(frozen=True)
class Parts:
    """A step as the kernel takes it: what it reads, what becomes of that, and the convolution."""

    image: TensorType
    affine: ChannelAffine
    epilogue: ConvEpilogue
    bias_count: int

    @property
    def outputs(self) -> int:
        """Channels of the result."""
        return self.epilogue.conv.types[0].shape[1]

    @property
    def bias(self) -> str:
        """Which values it has, in the header's words."""
        if self.epilogue.bias is None:
            return "kNone"
        return "kOne" if self.bias_count == 1 else "kEach"

    @property
    def pixels(self) -> int:
        """Pixels of the result."""
        images_, _, rows, columns = self.epilogue.conv.types[0].shape
        return images_ * rows * columns


def _read(step: Step) -> Parts:
    """The convolution behind a space_to_depth; raises IllegalCandidate with the reason."""
    affine = channel_affine_of(step)
    first = len(affine.nodes)
    epilogue = pointwise_conv_behind(step, "space_to_depth", skipped=first, unshifted=True)
    moved = step.nodes[first]
    if moved.inputs[0] != affine.result:
        raise IllegalCandidate(
            f"{moved.name!r} does not read {affine.result!r}, which is before it"
        )
    if moved.attrs["block"] != BLOCK:
        raise IllegalCandidate(f"patches are {BLOCK}x{BLOCK}, got {moved.attrs['block']}")
    count = 0 if epilogue.bias is None else step.types[epilogue.bias].numel
    return Parts(step.types[affine.source], affine, epilogue, count)


FAMILY = Stem()
