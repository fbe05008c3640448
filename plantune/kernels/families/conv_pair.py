"""Residual blocks of two 3x3 convolutions of few channels, in one kernel: `conv_pair.h`."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from plantune.devices.cuda.structs import fields
from plantune.graph import Node
from plantune.kernels.cuda import vector_kernel
from plantune.kernels.cuda.cuda_family import (
    Arch,
    Attrs,
    Binding,
    CudaFamily,
    Frame,
    Parts,
    Step,
    first_reason,
    refuse,
)
from plantune.kernels.cuda.grouped_filters import CHECK, UNIT, Groups, packed_filters
from plantune.kernels.cuda.small_matrix import MMA_FROM
from plantune.kernels.cuda.warp_mma import DTYPES, why_not_elements
from plantune.kernels.legality import READ_OUTSIDE
from plantune.kernels.patterns.epilogue import ConvEpilogue, channel_parts, epilogue_of
from plantune.kernels.patterns.expression import expression, functors
from plantune.kernels.rendering import struct
from plantune.kernels.weights.constants import Arrangement, Constants, Parameter

CHANNELS_MAX = 32
PIXELS_MIN, PIXELS_MAX = 32, 1024
REGISTERS_MIN = 64  # of a thread
ENTRIES = vector_kernel.ENTRIES.replace("{threads}", "{threads}, {blocks_per_sm}")
SAME = Attrs(stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1)


@dataclass(frozen=True)
class PairParts(Parts):
    """Both convolutions with what follows each, and whether a ReLU comes first."""

    first: ConvEpilogue
    second: ConvEpilogue
    relu_first: bool

    @property
    def x(self) -> str:
        return self.step.nodes[0].inputs[0]

    @property
    def y(self) -> str:
        return self.step.nodes[-1].name

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the image, and of what is made."""
        return self.step.types[self.x].shape

    @property
    def between(self) -> int:
        """Channels between both."""
        return self.first.conv.types[0].shape[1]

    @property
    def dtype(self) -> str:
        return self.step.types[self.x].dtype

    def tiles(self, config: Attrs) -> tuple[int, int]:
        """Along both axes of an image."""
        rows, columns = self.shape[2:]
        return -(-rows // int(config["rows"])), -(-columns // int(config["columns"]))

    def blocks(self, config: Attrs) -> int:
        return self.shape[0] * math.prod(self.tiles(config))

    def made(self, config: Attrs) -> tuple[int, int]:
        """Rows and columns of the value between that a block makes: with a margin, unless that is
        beyond the image.
        """
        sizes = zip((config["rows"], config["columns"]), self.tiles(config), strict=True)
        rows, columns = (int(size) + (2 if tiles > 1 else 0) for size, tiles in sizes)
        return rows, columns

    def shared_bytes(self, config: Attrs) -> int:
        """What a block reads, which becomes what it makes, and the value between."""
        read = math.prod(size + 2 for size in self.made(config)) * (self.shape[1] // UNIT | 1)
        between = (int(config["rows"]) + 2) * (int(config["columns"]) + 2)
        return vector_kernel.VECTOR_BYTES * (read + between * (self.between // UNIT | 1))

    def products(self, config: Attrs) -> float:
        """Products of 16 pixels, 16 values and 8 channels of all warps of a block."""
        channels = -(-9 * self.shape[1] // 16) * self.between // UNIT
        second = -(-9 * self.between // 16) * self.shape[1] // UNIT
        pixels = int(config["rows"]) * int(config["columns"])
        return (math.prod(self.made(config)) * channels + pixels * second) / 16


class ConvPair(CudaFamily[PairParts]):
    """Config: a block makes so many `rows` and `columns` of pixels, with so many `threads`; so many
    `blocks_per_sm` share a multiprocessor's registers.
    """

    name: ClassVar = "conv_pair"
    image_layout = "nhwc"

    def why_not_arch(self, arch: Arch) -> str | None:
        if arch.cuda is not None and arch.cuda.compute_capability < MMA_FROM:
            return f"{arch.name} has no products of 16 pixels with 16 channels"
        return super().why_not_arch(arch)

    def read(self, step: Step) -> PairParts:
        parts = _read(step)
        channels, dtype = (parts.shape[1], parts.between), parts.dtype
        refuse(
            {
                f"channels must be multiples of {UNIT} up to {CHANNELS_MAX}, got {channels}": any(
                    count % UNIT or count > CHANNELS_MAX for count in channels
                ),
                f"tensor cores take {' and '.join(DTYPES)} here, not {dtype}": dtype not in DTYPES,
                "there is nothing to compute": 0 in parts.shape,
            }
        )
        return parts

    def why_not_config(self, parts: PairParts, config: Attrs, arch: Arch) -> str | None:
        pixels = int(config["rows"]) * int(config["columns"])
        sizes = zip(("rows", "columns"), parts.shape[2:], strict=True)
        blocks, shared = int(config["blocks_per_sm"]), parts.shared_bytes(config)
        registers = arch.gpu.registers_per_sm // (blocks * int(config["threads"]))
        return (
            first_reason(
                {
                    **{
                        f"half of {config[word]} {word} hold all {size}": config[word] >= 2 * size
                        for word, size in sizes
                    },
                    f"a tile has {PIXELS_MIN} to {PIXELS_MAX} pixels, not {pixels}": not PIXELS_MIN
                    <= pixels
                    <= PIXELS_MAX,
                    f"{blocks} blocks leave a thread {registers} registers": registers
                    < REGISTERS_MIN,
                    f"{blocks} blocks of {shared} bytes do not fit": blocks > 1
                    and arch.gpu.resident(int(config["threads"]), REGISTERS_MIN, shared) < blocks,
                }
            )
            or why_not_elements(parts.dtype, arch)
            or super().why_not_config(parts, config, arch)
        )

    def shared_bytes(self, parts: PairParts, config: Attrs, arch: Arch) -> int:
        return parts.shared_bytes(config)

    def source(self, parts: PairParts, config: Attrs, arch: Arch) -> str:
        first, second = parts.first, parts.second
        pair = struct(
            "Pair",
            T=vector_kernel.ELEMENTS[parts.dtype],
            Between=expression(first.chain),
            Expression=expression(second.chain),
            **dict(zip(("kC", "kH", "kW"), parts.shape[1:], strict=True)),
            kBetween=parts.between,
            kTileP=config["rows"],
            kTileQ=config["columns"],
            kThreads=config["threads"],
            kReluFirst=parts.relu_first,
            kScale=first.scale is not None,
            kBias=first.bias is not None,
            kScale2=second.scale is not None,
            kBias2=second.bias is not None,
        )
        before = functors((*first.chain, *second.chain)) + pair
        entries = CHECK.format(parts.shared_bytes(config)) + ENTRIES
        return vector_kernel.source(
            self.name,
            "ConvPair<Pair>",
            config["threads"],
            before,
            entries,
            blocks_per_sm=config["blocks_per_sm"],
        )

    def bind(self, parts: PairParts, config: Attrs, frame: Frame) -> Binding:
        kernel = vector_kernel.VectorKernel(
            frame.built, parts.blocks(config), config["threads"], parts.shared_bytes(config)
        )
        constants, images = Constants(frame, _constants(parts)), {"x": parts.x, "y": parts.y}

        def launch(stream: int) -> None:
            kernel.launch(stream, constants.into(_Arguments, images), [frame.values[parts.x]])

        return Binding(launch, constants=constants.all)

    def estimate_us(self, parts: PairParts, config: Attrs, arch: Arch) -> float:
        """Blocks that share a multiprocessor share what it multiplies and moves; each waits for its
        tile and for both convolutions, one after the other.
        """
        assert arch.chip is not None
        cost, sms, threads = arch.cost(self.name), arch.chip.multiprocessors, int(config["threads"])
        resident = int(config["blocks_per_sm"])
        blocks = parts.blocks(config) / sms
        together = min(resident, max(1.0, blocks))
        waves = max(1.0, blocks / resident, (blocks / resident + math.ceil(blocks / resident)) / 2)
        products = parts.products(config)
        alone = products / (threads // 32) / cost["warp_per_us"]
        busy = max(alone, together * products / cost["sm_per_us"])
        moved = together * parts.shared_bytes(config) / cost["sm_bytes_per_us"]
        wave = cost["block_us"] + busy + moved
        return cost["launch_us"] + waves * wave * self.slowdown(parts, arch)


class _Arguments(ctypes.Structure):
    """plantune::ConvPair::Arguments."""

    _fields_ = fields(
        "x w w2 y scale:one bias:one scale2:one bias2:one",
        one=Parameter,
    )


def _constants(parts: PairParts) -> Mapping[str, tuple[str | None, Arrangement]]:
    """The filters of both as products read them, and numbers of each channel."""
    found: dict[str, tuple[str | None, Arrangement]] = {}
    for suffix, epilogue in (("", parts.first), ("2", parts.second)):
        weight = epilogue.conv.inputs[1]
        outputs, inputs = parts.step.types[weight].shape[:2]
        found["w" + suffix] = (
            weight,
            packed_filters(parts.step, weight, Groups(1, inputs, outputs, 1)),
        )
        numbers = channel_parts(parts.step, epilogue)
        found.update({word + suffix: made for word, made in numbers.items()})
    return found


def _read(step: Step) -> PairParts:
    """Both convolutions and what follows; raises IllegalCandidate."""
    nodes = step.nodes
    starts = [at for at, node in enumerate(nodes) if node.op == "conv2d"]
    refuse({"only two convolutions, one after the other": len(starts) != 2})
    before, between, after = nodes[: starts[0]], nodes[starts[0] : starts[1]], nodes[starts[1] :]
    first = epilogue_of(step, between, beside=_names(after))
    second = epilogue_of(step, after, beside=_names(between))
    x, leaving = nodes[0].inputs[0], {name for name, _ in step.outputs}
    refuse(
        {
            READ_OUTSIDE: leaving != {nodes[-1].name},
            "only a ReLU may come before": [node.op for node in before] not in ([], ["relu"]),
            "the first convolution does not read what comes before": bool(before)
            and first.conv.inputs[0] != before[-1].name,
            "the second convolution does not read the first": second.conv.inputs[0]
            != between[-1].name,
            "only convolutions of 3x3 that keep the size of images": any(
                each.conv.attrs != SAME or step.types[each.conv.inputs[1]].shape[2:] != (3, 3)
                for each in (first, second)
            ),
            "only functions may follow the first convolution": first.residual is not None
            or first.offset is not None,
            "the step's image is what must be added at the end": second.residual != x
            or second.offset is not None,
        }
    )
    return PairParts(step, first, second, bool(before))


def _names(nodes: tuple[Node, ...]) -> list[str]:
    return [node.name for node in nodes]


FAMILY = ConvPair()
