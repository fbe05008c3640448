"""A residual block with squeeze-and-excite in one kernel: `csrc/cuda/se_resnet9/hopper_block.h`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from plantune.kernels.family import Arch, Attrs, Binding, Frame, Step, refuse
from plantune.kernels.hopper import family as hopper
from plantune.kernels.hopper import squeeze
from plantune.kernels.hopper.design import Design
from plantune.kernels.hopper.elements import Elements
from plantune.kernels.hopper.launch import HopperLaunch
from plantune.kernels.hopper.tiles import (
    CHUNK,
    ROW_BYTES,
    SWIZZLE_BYTES,
    Box,
    ConvShape,
    conv_shape,
)
from plantune.kernels.patterns.epilogue import ConvEpilogue, conv_epilogue
from plantune.kernels.patterns.expression import expression
from plantune.kernels.patterns.squeeze_excite import SqueezeExcite
from plantune.kernels.weights.constants import Constants, Parameter

INCLUDE = '#include "cuda/se_resnet9/hopper_block.h"\n'


class BlockScalars(squeeze.GateScalars):
    """plantune::BlockScalars."""

    _fields_ = tuple((name, Parameter) for name in ("mid_scale", "mid_bias", "mid_offset"))


@dataclass(frozen=True)
class BlockParts(hopper.WarpgroupParts):
    """Both convolutions with what follows each, and the layers after the second. `epilogue` reads
    and leaves what the block does.
    """

    layers: SqueezeExcite
    first: ConvEpilogue
    second: ConvEpilogue

    @cached_property
    def second_shape(self) -> ConvShape:
        return conv_shape(self.step, self.second)


class HopperBlock(hopper.HopperFamily[BlockParts]):
    """Config: `tile_m` pixels of whole images and `stages` of weights in flight; at most
    `blocks_per_sm` share an SM.
    """

    name: ClassVar = "hopper_block"

    def read(self, step: Step) -> BlockParts:
        parts = _block(step)
        shape, second, width = parts.shape, parts.second_shape, parts.layers.squeeze.width
        same = (second.r // 2, second.s // 2)
        rows = shape.stride == (1, 1) and shape.r * shape.s > 1
        keeps = second.stride == (1, 1) and second.padding == same and second.r % 2 * second.s % 2
        refuse(
            {
                f"it takes up to {squeeze.HIDDEN_MAX} hidden channels, got {width}": width
                > squeeze.HIDDEN_MAX,
                f"a block has all channels: 64 or 128, got {shape.o}": shape.o
                not in squeeze.TILE_NS
                or second.o != shape.o,
                f"a warpgroup has 8x8 pixels, got {shape.p}x{shape.q}": shape.p % 8 or shape.q % 8,
                "without a margin, 64 rows are 8x8 pixels in images of 8 columns": not rows
                and shape.q != 8,
                "the second convolution keeps the image's size, with an odd kernel": not keeps,
            }
        )
        refuse(hopper.not_a_warpgroups(step, parts.first))
        refuse(hopper.not_a_warpgroups(step, parts.second))
        return parts

    def why_not_config(self, parts: BlockParts, config: Attrs, arch: Arch) -> str | None:
        shape, tile_m = parts.shape, int(config["tile_m"])
        if tile_m % (shape.p * shape.q):
            return f"{tile_m} pixels are not whole images of {shape.p}x{shape.q}"
        return super().why_not_config(parts, config, arch)

    def design(self, parts: BlockParts, config: Attrs) -> Design:
        shape, tile_m = parts.shape, int(config["tile_m"])
        images = max(1, tile_m // (shape.p * shape.q))
        layers = (16, squeeze.layers_bytes(tile_m, images, shape.o, parts.layers))
        middle = (SWIZZLE_BYTES, _middle_bytes(parts.second_shape, images))
        axes: dict[str, Any] = dict(config)
        elements = Elements.single(parts.dtype)
        return Design(
            shape,
            Box(shape.q, shape.p, images),
            **axes,
            tile_n=shape.o,
            split_k=1,
            reuse=hopper.why_not_reuse(shape, tile_m) is None,
            elements=elements,
            tile_bytes=elements.tile_bytes(parts.epilogue),
            extra=(layers, middle, (4, 2 * 4 * shape.o)),
        )

    def source(self, parts: BlockParts, config: Attrs, arch: Arch) -> str:
        design, second = self.design(parts, config), parts.second_shape
        first = parts.first
        constants = design.constants(
            parts.epilogue,
            first.chain,
            kR2=second.r,
            kS2=second.s,
            kMidScale=first.scale is not None,
            kMidBias=first.bias is not None,
            MidExpression=expression(first.chain),
            **squeeze.hidden_members(parts.layers),
        )
        return INCLUDE + constants + design.kernel("HopperBlock", "BlockScalars", "BlockMaps")

    def bind(self, parts: BlockParts, config: Attrs, frame: Frame) -> Binding:
        read = {
            **hopper.filter_and_scalars(parts.step, parts.first, prefix="mid_"),
            **hopper.filter_and_scalars(parts.step, parts.second, "w2"),
            **squeeze.layer_constants(parts.step, parts.layers),
        }
        constants = Constants(frame, read)
        return HopperLaunch(
            parts, self.design(parts, config), frame, constants, BlockScalars
        ).bound()

    def estimate_us(self, parts: BlockParts, config: Attrs, arch: Arch) -> float:
        design = self.design(parts, config)
        first_us = hopper.estimate_us(design, parts.step.traffic_bytes, arch)
        second_us = hopper.estimate_us(replace(design, shape=parts.second_shape), 0.0, arch)
        # One launch, one wait for the kernel in front.
        return first_us + second_us - 1.8 + arch.cost(hopper.COSTS)["layers_us"]


def _block(step: Step) -> BlockParts:
    """The parts of a residual block; raises IllegalCandidate with what is missing."""
    convs = [i for i, op in enumerate(step.ops) if op == "conv2d"]
    refuse({"a block is two convolutions and what follows them": len(convs) != 2 or convs[0] != 0})
    start = step.part(step.nodes[: convs[1]], (step.nodes[convs[1] - 1].name,))
    first = conv_epilogue(start)
    made = {value for node in start.nodes for value in node.outputs}
    left = [name for name, _ in step.outputs if name in made]
    nodes = step.nodes[convs[1] :]
    read = {value for node in nodes for value in node.inputs}
    middle = start.nodes[-1].name
    beside = left or read & made != {middle} or nodes[0].inputs[0] != middle
    refuse(
        {
            "a value within the block is read beside the second convolution": beside,
            "the block adds an image before the second convolution": first.residual is not None,
        }
    )
    second, layers = squeeze.parts_of(step.part(nodes, dict(step.outputs)))
    return BlockParts(step, replace(second, conv=first.conv), layers, first, second)


def _middle_bytes(second: ConvShape, count: int) -> int:
    """What the second convolution reads: images with a margin, in rows of 64 channels."""
    pixels = count * (second.p + second.r - 1) * (second.q + second.s - 1)
    chunk = -(-pixels * ROW_BYTES // SWIZZLE_BYTES) * SWIZZLE_BYTES
    return second.o // CHUNK * chunk


FAMILY = HopperBlock()
