"""The gradient of the weight of a stem, SpaceToDepth(4) and a 1x1 convolution, from the image."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from plantune.canonical import Attrs
from plantune.graph.graph import Node
from plantune.graph.step import Step
from plantune.graph.types import TensorType
from plantune.kernels.cuda_family import CudaFamily
from plantune.kernels.families.se_resnet9.stem import BLOCK, PIXELS
from plantune.kernels.family import Binding, Frame, Parts
from plantune.kernels.launcher import Launcher
from plantune.kernels.legality import first_reason, refuse
from plantune.kernels.part_sum import PartSum
from plantune.kernels.patterns.channel_affine import (
    ChannelAffine,
    ChannelScales,
    channel_affine_of,
)
from plantune.kernels.patterns.pointwise_conv import PLAIN, POINTWISE
from plantune.kernels.rendering import cxx_bool
from plantune.kernels.vector_kernel import ELEMENTS
from plantune.kernels.warp_mma import not_countable, why_not_elements
from plantune.space.arch import Arch

# Pixels of a product, and outputs of a block; a lane reads so many of these at once.
PIXELS_AT_ONCE, TILE_O, AT_ONCE = 16, 64, 8
# Sums of more channels leave a warp no registers to read ahead with.
CHANNELS_OF_WARP = 3
SOURCE = """\
#include "cuda/se_resnet9/stem_wgrad.h"
#include "cuda/wgrad_sum.h"

struct Sizes {{
  using T = {element};
  static constexpr int kChannels = {channels}, kOutputs = {outputs};
  static constexpr int kHeight = {height}, kWidth = {width};
  static constexpr int kO = kOutputs, kC = 16 * kChannels, kR = 1, kS = 1;
  static constexpr bool kChannelsLast = true;
  {sum.members}
}};
struct Work {{
  static constexpr int kThreads = {threads}, kStages = {stages};
  static constexpr int kChannelsOfWarp = {channels_of_warp};
}};
using Pixels = plantune::StemPixels<{pixel}, {scaled}>;
using Kernel = plantune::StemWgrad<Sizes::T, Pixels, Sizes, Work>;
using Sum = plantune::WgradSum<Sizes>;
static_assert(Kernel::kSharedBytes == {shared_bytes} && Sum::kThreads == {sum.threads},
              "what is launched is what was planned");
extern "C" __global__ void __launch_bounds__(Kernel::kThreads)
    run(const __grid_constant__ Kernel::Arguments arguments) {{
  Kernel::run(arguments);
}}
extern "C" __global__ void __launch_bounds__(Sum::kThreads)
    sum(const float* sums, Sizes::T* dw) {{
  Sum::run(sums, dw);
}}
"""


@dataclass(frozen=True)
class StemGradient(Parts):
    """A step as the kernel takes it: what becomes of the image, and the gradient."""

    affine: ChannelAffine

    @property
    def node(self) -> Node:
        return self.step.nodes[-1]

    @property
    def dy(self) -> TensorType:
        return self.step.types[self.node.inputs[0]]

    @property
    def image(self) -> TensorType:
        return self.step.types[self.affine.source]

    @property
    def channels(self) -> int:
        """Of the image."""
        return self.image.shape[1]

    @property
    def outputs(self) -> int:
        return self.dy.shape[1]

    @property
    def pixels(self) -> int:
        return self.dy.numel // self.outputs

    @property
    def products(self) -> int:
        return -(-self.pixels // PIXELS_AT_ONCE)

    @property
    def shares(self) -> int:
        """Warps that share the channels of the image."""
        return -(-self.channels // CHANNELS_OF_WARP)

    @property
    def channels_of_warp(self) -> int:
        return -(-self.channels // self.shares)

    @property
    def shared_bytes(self) -> int:
        """A team's sums."""
        return self.shares * self.channels_of_warp * BLOCK * BLOCK * TILE_O * 4

    def teams(self, config: Attrs) -> int:
        """Parts of a block that each read pixels of their own."""
        return int(config["threads"]) // 32 // self.shares

    def sum(self, config: Attrs) -> PartSum:
        """Each block makes a part."""
        blocks = min(int(config["blocks"]), -(-self.products // max(self.teams(config), 1)))
        return PartSum(blocks, 1, self.outputs, BLOCK * BLOCK * self.channels)


class StemWgrad(CudaFamily[StemGradient]):
    """Config: `blocks` of so many `threads` share the pixels, a warp reads `stages` products ahead.

    The image is read as it comes, in nchw and of any dtype that a cast takes.
    """

    name: ClassVar = "stem_wgrad"

    def read(self, step: Step) -> StemGradient:
        affine = channel_affine_of(step)
        rest = step.nodes[len(affine.nodes) :]
        wanted = tuple(node.op for node in rest) == ("space_to_depth", "conv2d_wgrad")
        refuse({"not the gradient of a convolution after a space_to_depth": not wanted})
        moved, node = rest
        attrs: Any = node.attrs
        parts = StemGradient(step, affine)
        block, dtype, outputs = moved.attrs["block"], parts.image.dtype, parts.outputs
        plain = all(attrs[key] == value for key, value in PLAIN.items())
        single, dy = node.types[0].shape[2:] == (1, 1), node.inputs[0]
        elsewhere = f"{moved.name!r} does not read {affine.result!r}, which is before it"
        other = f"the image of {node.name!r} is not {moved.name!r}"
        uneven = f"a lane reads {AT_ONCE} outputs at once, {outputs} do not divide"
        refuse(
            {
                elsewhere: moved.inputs[0] != affine.result,
                other: node.inputs[1] != moved.name or dy == moved.name,
                f"only {POINTWISE}": not (plain and single),
                f"patches are {BLOCK}x{BLOCK}, got {block}": block != BLOCK,
                f"the kernel reads {', '.join(PIXELS)}, got {dtype}": dtype not in PIXELS,
                uneven: outputs % AT_ONCE,
                "a value before the gradient is read outside of it": len(step.outputs) > 1,
                "an image is constant": step.constants & {affine.source, dy},
                **not_countable(parts.pixels),
            }
        )
        return parts

    def layouts(self, parts: StemGradient, config: Attrs) -> Mapping[str, str]:
        return {parts.affine.source: "nchw", parts.node.inputs[0]: "nhwc"}

    def why_not_config(self, parts: StemGradient, config: Attrs, arch: Arch) -> str | None:
        assert arch.cuda is not None
        volta = all(shape.m < 16 for shape in arch.cuda.mma_shapes_fp16)
        reasons = {
            f"the tensor cores of {arch.name} have no products of 16 by 8": volta,
            f"{parts.channels} channels take {parts.shares} warps": not parts.teams(config),
        }
        reason = first_reason(reasons) or why_not_elements(parts.node.types[0].dtype, arch)
        return reason or super().why_not_config(parts, config, arch)

    def shared_bytes(self, parts: StemGradient, config: Attrs, arch: Arch) -> int:
        return parts.shared_bytes

    def workspace_bytes(self, parts: StemGradient, config: Attrs) -> int:
        return parts.sum(config).bytes

    def source(self, parts: StemGradient, config: Attrs, arch: Arch) -> str:
        _, channels, height, width = parts.image.shape
        return SOURCE.format(
            element=ELEMENTS[parts.node.types[0].dtype],
            **{"channels": channels, "height": height, "width": width},
            outputs=parts.outputs,
            sum=parts.sum(config),
            threads=config["threads"],
            stages=config["stages"],
            channels_of_warp=parts.channels_of_warp,
            pixel=PIXELS[parts.image.dtype],
            scaled=cxx_bool(parts.affine.scales),
            shared_bytes=parts.shared_bytes,
        )

    def bind(self, parts: StemGradient, config: Attrs, frame: Frame) -> Binding:
        values, dw, dy = frame.values, parts.node.name, parts.node.inputs[0]
        scales = ChannelScales(parts.affine, parts.channels, frame)
        sum_, products = parts.sum(config), parts.products
        blocks = (sum_.parts, -(-parts.outputs // TILE_O))
        threads, shared_bytes = int(config["threads"]), parts.shared_bytes
        kernel = Launcher(frame.built, blocks, threads, shared_bytes=shared_bytes)
        add = Launcher(frame.built, sum_.blocks, sum_.threads, name="sum")
        assert frame.workspace is not None
        workspace = ctypes.c_void_p(frame.workspace.data_ptr())

        def launch(stream: int) -> None:
            addresses = (values[parts.affine.source].data_ptr(), values[dy].data_ptr())
            table = scales.tensor.data_ptr()
            counts = (parts.pixels, -(-products // sum_.parts))
            kernel.launch(stream, _Arguments(*addresses, table, workspace.value, *counts))
            add.launch(stream, workspace, ctypes.c_void_p(values[dw].data_ptr()))

        return Binding(launch, constants=scales.constants)

    def estimate_us(self, parts: StemGradient, config: Attrs, arch: Arch) -> float:
        """What warps that are there at once have under way, as long as it takes to arrive."""
        assert arch.cuda is not None
        assert arch.chip is not None
        cost, sum_, threads = arch.cost(self.name), parts.sum(config), int(config["threads"])
        ahead = int(config["stages"])
        registers = cost["registers"] + ahead * cost["registers_of_stage"]
        fitting = int(arch.cuda.registers_per_sm / (threads * registers))
        there = min(fitting, -(-sum_.parts // arch.chip.multiprocessors))
        bytes_of_product = parts.step.traffic_bytes / parts.products
        under_way = there * parts.teams(config) * ahead * bytes_of_product
        rate = min(under_way * arch.chip.multiprocessors / cost["arrives_us"], cost["bytes_per_us"])
        moving_us = parts.step.traffic_bytes / rate * self.slowdown(parts, arch)
        return cost["launch_us"] + moving_us + 2 * sum_.bytes / cost["sums_bytes_per_us"]


class _Arguments(ctypes.Structure):
    """StemWgrad::Arguments."""

    _fields_ = (
        *((part, ctypes.c_void_p) for part in ("x", "dy", "scales", "parts")),
        *((count, ctypes.c_int) for count in ("pixels", "products")),
    )


FAMILY = StemWgrad()
