"""A residual block with squeeze-and-excite in one kernel: `csrc/cuda/se_resnet9/hopper_block.h`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from plantune.canonical import Attrs
from plantune.errors import IllegalCandidate
from plantune.graph.step import Step
from plantune.kernels.constants import Parameter
from plantune.kernels.family import Binding, Frame
from plantune.kernels.hopper.design import SWIZZLE_BYTES, Design
from plantune.kernels.hopper.family import (
    HopperFamily,
    estimate_us,
    why_not_conv,
    why_not_reuse,
)
from plantune.kernels.hopper.launch import Launch
from plantune.kernels.hopper.prepared import Prepared
from plantune.kernels.hopper.squeeze import (
    HIDDEN_MAX,
    LAYERS_US,
    TILE_NS,
    PreparedSe,
    SeScalars,
    beginning,
    hidden_constants,
    layers_bytes,
    parts_of,
)
from plantune.kernels.hopper.tiles import CHUNK, ROW_BYTES, Box, ConvShape, conv_shape
from plantune.kernels.patterns.epilogue import ConvEpilogue, conv_epilogue
from plantune.kernels.patterns.squeeze_excite import SqueezeExcite
from plantune.space.arch import Arch

INCLUDE = '#include "cuda/se_resnet9/hopper_block.h"\n'
CONSTANTS = """  static constexpr int kR2 = {r}, kS2 = {s};
  static constexpr bool kMidScale = {scale}, kMidBias = {bias};
  static constexpr bool kMidRelu = {relu}, kMidOffset = {offset};
"""


class BlockScalars(SeScalars):
    """plantune::BlockScalars."""

    _fields_ = tuple((name, Parameter) for name in ("mid_scale", "mid_bias", "mid_offset"))


@dataclass(frozen=True)
class Block:
    """Both convolutions with what follows each. `whole` reads and leaves what the block does."""

    first: ConvEpilogue
    second: ConvEpilogue
    layers: SqueezeExcite

    @property
    def whole(self) -> ConvEpilogue:
        return replace(self.second, conv=self.first.conv)


class HopperBlock(HopperFamily):
    """Config: `tile_m` pixels of whole images and `stages` of weights in flight; at most
    `blocks_per_sm` share an SM.
    """

    name: ClassVar = "hopper_block"

    def why_not_step(self, step: Step) -> str | None:
        try:
            block = _block(step)
        except IllegalCandidate as reason:
            return str(reason)
        shape, second = conv_shape(step, block.first), conv_shape(step, block.second)
        width = block.layers.squeeze.width
        same = (second.r // 2, second.s // 2)
        rows = shape.stride == (1, 1) and shape.r * shape.s > 1
        reasons = {
            f"it takes up to {HIDDEN_MAX} hidden channels, got {width}": width > HIDDEN_MAX,
            f"a block has all channels: 64 or 128, got {shape.o}": shape.o not in TILE_NS
            or second.o != shape.o,
            f"a warpgroup has 8x8 pixels, got {shape.p}x{shape.q}": shape.p % 8 or shape.q % 8,
            "without a margin, 64 rows are 8x8 pixels in images of 8 columns": not rows
            and shape.q != 8,
            "the second convolution keeps the image's size, with an odd kernel": second.stride
            != (1, 1)
            or second.padding != same
            or second.r % 2 * second.s % 2 == 0,
        }
        found = [text for text, holds in reasons.items() if holds]
        found += [
            text for part in (block.first, block.second) if (text := why_not_conv(step, part))
        ]
        return next(iter(found), None)

    def why_not_config(self, step: Step, config: Attrs, arch: Arch) -> str | None:
        shape, tile_m = conv_shape(step, _block(step).first), int(config["tile_m"])
        if tile_m % (shape.p * shape.q):
            return f"{tile_m} pixels are not whole images of {shape.p}x{shape.q}"
        return super().why_not_config(step, config, arch)

    def design(self, step: Step, config: Attrs) -> Design:
        return _design(step, config)

    def whole(self, step: Step) -> ConvEpilogue:
        return _block(step).whole

    def source(self, step: Step, config: Attrs, arch: Arch) -> str:
        block, design = _block(step), _design(step, config)
        second, first = conv_shape(step, block.second), block.first
        parts = ("scale", "bias", "relu", "offset")
        has = {part: "true" if getattr(first, part) else "false" for part in parts}
        more = CONSTANTS.format(r=second.r, s=second.s, **has)
        more += hidden_constants(block.layers)
        dtype = step.types[first.conv.name].dtype
        constants = design.constants(dtype, block.whole, more)
        return INCLUDE + constants + design.kernel("HopperBlock", "BlockScalars", "BlockMaps")

    def bind(self, step: Step, config: Attrs, frame: Frame) -> Binding:
        block, design = _block(step), _design(step, config)
        first = Prepared(step, block.first, frame)
        second = PreparedSe(step, block.second, block.layers, frame)

        def scalars() -> BlockScalars:
            mid = {f"mid_{part}": value for part, value in first.parameters().items()}
            return BlockScalars(**second.named(), **mid)

        launch = Launch(step, block.whole, design, frame, first.weight, scalars, second.weight)
        return Binding(launch.bound(), constants=(*first.constants, *second.constants))

    def estimate_us(self, step: Step, config: Attrs) -> float:
        design = _design(step, config)
        second = conv_shape(step, _block(step).second)
        # One launch, one wait for the kernel in front.
        first_us = estimate_us(design, self.traffic_bytes(step))
        both_us = first_us + estimate_us(replace(design, shape=second), 0.0) - 1.8
        return both_us + LAYERS_US


def _block(step: Step) -> Block:
    """The parts of a residual block; raises IllegalCandidate with what is missing."""
    convs = [i for i, op in enumerate(step.ops) if op == "conv2d"]
    if len(convs) != 2 or convs[0] != 0:
        raise IllegalCandidate("a block is two convolutions and what follows them")
    start = beginning(step, convs[1])
    first = conv_epilogue(start)
    made = {value for node in start.nodes for value in node.outputs}
    left = [name for name, _ in step.outputs if name in made]
    nodes = step.nodes[convs[1] :]
    read = {value for node in nodes for value in node.inputs}
    middle = start.nodes[-1].name
    if left or read & made != {middle} or nodes[0].inputs[0] != middle:
        raise IllegalCandidate("a value within the block is read beside the second convolution")
    if first.residual is not None:
        raise IllegalCandidate("the block adds an image before the second convolution")
    inputs = tuple((name, type_) for name, type_ in step.inputs if name in read)
    inputs += ((middle, step.types[middle]),)
    constants = step.constants & read
    second, layers = parts_of(Step(nodes, inputs, step.outputs, constants, step.phase))
    return Block(first, second, layers)


def _design(step: Step, config: Attrs) -> Design:
    block = _block(step)
    shape, second = conv_shape(step, block.first), conv_shape(step, block.second)
    tile_m = int(config["tile_m"])
    count = max(1, tile_m // (shape.p * shape.q))
    axes: dict[str, Any] = dict(config)
    return Design(
        shape,
        Box(shape.q, shape.p, count),
        **axes,
        tile_n=shape.o,
        split_k=1,
        reuse=why_not_reuse(shape, tile_m) is None,
        outputs=1 if block.second.unshifted is None else 2,
        extra=(
            (16, layers_bytes(tile_m, count, shape.o, block.layers)),
            (SWIZZLE_BYTES, _middle_bytes(second, count)),
            (4, 2 * 4 * shape.o),
        ),
    )


def _middle_bytes(second: ConvShape, count: int) -> int:
    """What the second convolution reads: images with a margin, in rows of 64 channels."""
    pixels = count * (second.p + second.r - 1) * (second.q + second.s - 1)
    chunk = -(-pixels * ROW_BYTES // SWIZZLE_BYTES) * SWIZZLE_BYTES
    return second.o // CHUNK * chunk


FAMILY = HopperBlock()
