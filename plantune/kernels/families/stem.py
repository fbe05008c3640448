"""SpaceToDepth(4), 1x1 convolution, bias, ReLU and offset in one CUDA kernel."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import c_int
from typing import ClassVar

from torch import Tensor

from plantune.cuda.kernel import Kernel
from plantune.errors import IllegalCandidate
from plantune.graph.step import Step
from plantune.kernels.cuda_family import CudaFamily
from plantune.kernels.family import Binding, Frame, images
from plantune.kernels.patterns.epilogue import ConvEpilogue
from plantune.kernels.patterns.pointwise_conv import Shifts, pointwise_conv_behind
from plantune.kernels.vector_kernel import ELEMENTS, PROGRAMMATIC_FROM
from plantune.kernels.warp_mma import CHANNELS, PackedWeight, padded, why_not_elements
from plantune.space.arch import Arch
from plantune.values import Attrs

BLOCK = 4
OUTPUTS_AT_ONCE = 8
SOURCE = """\
#include "cuda/stem.h"

using T = {element};
using Kernel = plantune::Stem<T, plantune::ImageShape<{c}, {h}, {w}>, {outputs},
                              plantune::StemTile<{tile_m}, {tile_n}, {warp_m}>, {relu}, {plain}>;
static_assert(Kernel::kSharedBytes == {shared_bytes}, "the launch asks for what the kernel uses");

extern "C" __global__ void __launch_bounds__(Kernel::kThreads)
run(const T* x, const uint4* weight, const float* shifts, T* y, T* plain, int pixels) {{
  Kernel::run(x, weight, shifts, y, plain, pixels);
}}
"""


class Stem(CudaFamily):
    """Config: output pixels `tile_m` and channels `tile_n` of a block, pixels `warp_m` of a warp.

    The image is read as it comes, in nchw; what leaves is nhwc. The value before the offset may
    leave, too.
    """

    name: ClassVar = "stem"
    build_s = 0.5

    def why_not_step(self, step: Step) -> str | None:
        try:
            epilogue = _read(step)
        except IllegalCandidate as reason:
            return str(reason)
        shape = epilogue.conv.types[0].shape
        if shape[1] % OUTPUTS_AT_ONCE:
            return f"a lane writes {OUTPUTS_AT_ONCE} channels at once, {shape[1]} do not divide"
        if not 0 < _pixels(epilogue) < 1 << 30:
            return f"pixels are counted in 30 bits, got {_pixels(epilogue)}"
        return None

    def why_not_config(self, step: Step, config: Attrs, arch: Arch) -> str | None:
        epilogue = _read(step)
        outputs = epilogue.conv.types[0].shape[1]
        if config["tile_n"] >= padded(outputs, CHANNELS) + CHANNELS:
            return f"tile_n {config['tile_n']} has warps without any of the {outputs} channels"
        reason = why_not_elements(epilogue.conv.types[0].dtype, arch)
        return reason or super().why_not_config(step, config, arch)

    def layouts(self, step: Step, config: Attrs) -> Mapping[str, str]:
        return {**images(step, "nhwc"), step.nodes[0].inputs[0]: "nchw"}

    def threads(self, step: Step, config: Attrs) -> int:
        return int(config["tile_m"]) // int(config["warp_m"]) * 32

    def shared_bytes(self, step: Step, config: Attrs) -> int:
        """The weights of the block's channels."""
        channels = step.types[step.nodes[0].inputs[0]].shape[1]
        return channels * BLOCK * BLOCK * int(config["tile_n"]) * 2

    def source(self, step: Step, config: Attrs, arch: Arch) -> str:
        epilogue = _read(step)
        (_, c, h, w), type_ = step.types[step.nodes[0].inputs[0]].shape, epilogue.conv.types[0]
        return SOURCE.format(
            element=ELEMENTS[type_.dtype],
            **{"c": c, "h": h, "w": w, "outputs": type_.shape[1]},
            **config,
            relu=str(epilogue.relu).lower(),
            plain=str(epilogue.unshifted is not None).lower(),
            shared_bytes=self.shared_bytes(step, config),
        )

    def bind(self, step: Step, config: Attrs, frame: Frame) -> Binding:
        epilogue, values = _read(step), frame.values
        x, y = step.nodes[0].inputs[0], values[step.nodes[-1].name]
        plain = y if epilogue.unshifted is None else values[epilogue.unshifted]
        outputs, pixels = y.shape[1], _pixels(epilogue)
        tile_n = int(config["tile_n"])
        channels = step.types[x].shape[1]
        weight = PackedWeight((outputs, BLOCK * BLOCK * channels), tile_n, y)
        shifts = Shifts(epilogue, padded(outputs, tile_n), frame.device)
        kernel, threads = Kernel(frame.built), self.threads(step, config)
        grid = (-(-pixels // int(config["tile_m"])), -(-outputs // tile_n), 1)
        shared_bytes = self.shared_bytes(step, config)
        programmatic = kernel.written_for >= PROGRAMMATIC_FROM

        def refresh() -> None:
            weight.fill(by_patches(values[epilogue.conv.inputs[1]]))
            shifts.fill(values)

        def launch(stream: int) -> None:
            arguments = (values[x], weight.tensor, shifts.tensor, y, plain, c_int(pixels))
            kernel.launch(
                stream,
                grid,
                threads,
                arguments,
                shared_bytes=shared_bytes,
                programmatic=programmatic,
            )

        return Binding(launch, refresh)


def _read(step: Step) -> ConvEpilogue:
    """The convolution behind a space_to_depth; raises IllegalCandidate with the reason."""
    epilogue = pointwise_conv_behind(step, "space_to_depth", unshifted=True)
    if step.nodes[0].attrs["block"] != BLOCK:
        raise IllegalCandidate(f"patches are {BLOCK}x{BLOCK}, got {step.nodes[0].attrs['block']}")
    return epilogue


def _pixels(epilogue: ConvEpilogue) -> int:
    images_, _, rows, columns = epilogue.conv.types[0].shape
    return images_ * rows * columns


def by_patches(weight: Tensor) -> Tensor:
    """The weight with channel (dy * 4 + dx) * C + c, in the order c, dy, dx: a patch at a time."""
    return weight.view(weight.shape[0], BLOCK * BLOCK, -1).transpose(1, 2)


FAMILY = Stem()
