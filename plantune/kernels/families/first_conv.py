"""The convolution that reads an image of few channels, with its max pool: `first_conv.h`."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from plantune.devices.cuda.structs import fields
from plantune.kernels.cuda.launcher import Launcher
from plantune.kernels.family import Arch, Attrs, Binding, Frame, Step, images, refuse
from plantune.kernels.hopper.family import COSTS, WarpgroupFamily
from plantune.kernels.hopper.products import ELEMENTS, product
from plantune.kernels.hopper.tiles import ConvShape
from plantune.kernels.patterns.epilogue import ConvEpilogue, ConvParts, epilogue_of
from plantune.kernels.patterns.expression import expression, functors
from plantune.kernels.patterns.pooled_epilogue import before_the_pool
from plantune.kernels.rendering import struct
from plantune.kernels.weights.constants import Arrangement, Constants, floats

WARPGROUP, TILE_O, UNIT_BYTES = 128, 64, 16
WARPGROUPS = 3  # of a multiprocessor
# Beyond that, sums of a row of pixels leave no registers for what fetches the next one.
COLUMNS_MAX = 128
# A strip may be so high whatever the image is.
ROWS_MIN = 4
SOURCE = """using Kernel = plantune::FirstConv<Conv>;
static_assert(Kernel::kThreads == {threads} && Kernel::kSharedBytes == {shared_bytes} &&
                  Kernel::kBlocks == {blocks},
              "what is launched is what was planned");
extern "C" __global__ void __launch_bounds__(Kernel::kThreads, {resident})
    run(const __grid_constant__ Kernel::Arguments arguments) {{
  Kernel::run(arguments);
}}
"""


@dataclass(frozen=True)
class FirstConvDesign:
    """Sizes of the problem, and of what a warpgroup makes of it."""

    epilogue: ConvEpilogue
    pool: bool
    x: tuple[int, ...]
    weight: tuple[int, ...]
    conv: tuple[int, ...]
    out: tuple[int, ...]
    rows: int
    groups: int

    @property
    def stride(self) -> tuple[int, int]:
        stride: tuple[int, int] = self.epilogue.conv.attrs["stride"]
        return stride

    @property
    def pixel(self) -> int:
        """Channels of a pixel in shared memory."""
        return 8 // self.stride[1]

    @property
    def steps(self) -> int:
        """Steps of 16 products for a row of the filter."""
        return -(-self.weight[3] * self.pixel // 16)

    @property
    def tiles_w(self) -> int:
        return next(n for n in range(1, self.conv[3] + 1) if self._columns(n) <= COLUMNS_MAX)

    @property
    def columns(self) -> int:
        """Pixels of a row of the convolution that a warpgroup makes at once."""
        return self._columns(self.tiles_w)

    def _columns(self, tiles: int) -> int:
        """A pool reads a pair of the tile before too."""
        pixels = self.conv[3] + (2 * (tiles - 1) if self.pool else 0)
        return -(-pixels // (8 * tiles)) * 8

    @property
    def strips(self) -> int:
        return -(-self.out[2] // self.rows)

    @property
    def tiles_o(self) -> int:
        return -(-self.conv[1] // TILE_O)

    @property
    def threads(self) -> int:
        return WARPGROUP * self.groups

    @property
    def resident(self) -> int:
        """Blocks of a multiprocessor: a fourth warpgroup would leave too few registers."""
        return max(WARPGROUPS // self.groups, 1)

    @property
    def blocks(self) -> int:
        return -(-self.x[0] * self.strips * self.tiles_w // self.groups) * self.tiles_o

    @property
    def shared_bytes(self) -> int:
        """The weights, a ring of rows for each warpgroup, and as much more as the header says."""
        weights = self.weight[2] * self.steps * TILE_O * 16 * 2
        rows_at_once = 2 if self.pool else 1
        advance = rows_at_once * self.stride[0]
        ring = (rows_at_once - 1) * self.stride[0] + self.weight[2] + advance
        rows = self.groups * ring * (self.columns - 1 + 2 * self.steps)
        return weights + (rows + self.columns - 1) * UNIT_BYTES

    def source(self, dtype: str, layout: str) -> str:
        (n, c, h, w), (o, _, r, s), (_, _, p, q) = self.x, self.weight, self.conv
        padding = self.epilogue.conv.attrs["padding"]
        # It commutes with rounding and with the pool, and pairs take it at once.
        relu_last = self.epilogue.chain[-1:] == ("relu",)
        chain = self.epilogue.chain[:-1] if relu_last else self.epilogue.chain
        conv = struct(
            "Conv",
            T=ELEMENTS[dtype],
            **ConvShape(n, c, h, w, o, r, s, p, q, self.stride, padding).members,
            **dict(zip(("kOutH", "kOutW"), self.out[2:], strict=True)),
            **{"kColumns": self.columns, "kTilesW": self.tiles_w},
            **{"kRows": self.rows, "kGroups": self.groups},
            kPool=self.pool,
            kScale=self.epilogue.scale is not None,
            kBias=self.epilogue.bias is not None,
            kReluLast=relu_last,
            kNhwc=layout == "nhwc",
            Expression=expression(chain),
        )
        before = product(dtype, self.columns) + functors(chain) + conv
        own = ("threads", "shared_bytes", "blocks", "resident")
        sizes = {word: getattr(self, word) for word in own}
        return '#include "cuda/first_conv.h"\n' + before + SOURCE.format(**sizes)


@dataclass(frozen=True)
class FirstParts(ConvParts):
    """The convolution, and whether a pool follows it."""

    pool: bool

    def sizes(self, *names: str) -> tuple[tuple[int, ...], ...]:
        return tuple(self.step.types[name].shape for name in names)


class FirstConv(WarpgroupFamily[FirstParts]):
    """Config: the image's `layout`; the warpgroups of `threads` make `rows` rows each."""

    name: ClassVar = "first_conv"

    def read(self, step: Step) -> FirstParts:
        parts = _read(step)
        attrs, dtype = parts.conv.attrs, step.types[parts.x].dtype
        (n, c, h, w), (o, *_), result = parts.sizes(*parts.conv.inputs, parts.y)
        width, columns = attrs["stride"][1], result[3]
        refuse(
            {
                f"a warpgroup multiplies float16 or bfloat16, got {dtype}": dtype not in ELEMENTS,
                "only convolutions without groups and dilation": attrs["groups"] != 1
                or attrs["dilation"] != (1, 1),
                f"pixels 16 bytes apart need a stride of 1, 2 or 4, got {width}": width
                not in (1, 2, 4),
                f"{width} pixels of {c} channels take more than 16 bytes": c * width > 8,
                f"a thread writes two channels, {o} do not divide": o % 2 != 0,
                "there is nothing to compute": min(n, c, o) == 0,
                "elements of an image are counted in 31 bits": c * h * w >= 1 << 31,
                "elements of a row of the result are counted in 31 bits": o * columns >= 1 << 31,
            }
        )
        return parts

    def design(self, parts: FirstParts, config: Attrs) -> FirstConvDesign:
        x, weight, conv, out = parts.sizes(*parts.conv.inputs, parts.conv.name, parts.y)
        rows, groups = config["rows"], config["threads"] // WARPGROUP
        return FirstConvDesign(parts.epilogue, parts.pool, x, weight, conv, out, rows, groups)

    def why_not_config(self, parts: FirstParts, config: Attrs, arch: Arch) -> str | None:
        rows = self.design(parts, config).out[2]
        if config["rows"] >= 2 * max(rows, ROWS_MIN):
            return f"{config['rows']} rows are far more than the {rows} that there are"
        return super().why_not_config(parts, config, arch)

    def layouts(self, parts: FirstParts, config: Attrs) -> Mapping[str, str]:
        return {**images(parts.step, "nhwc"), parts.x: config["layout"]}

    def source(self, parts: FirstParts, config: Attrs, arch: Arch) -> str:
        return self.design(parts, config).source(parts.dtype, config["layout"])

    def bind(self, parts: FirstParts, config: Attrs, frame: Frame) -> Binding:
        design = self.design(parts, config)
        constants, images = read_constants(parts, design, frame), {"x": parts.x, "y": parts.y}
        kernel = Launcher(
            frame.built, design.blocks, design.threads, shared_bytes=design.shared_bytes
        )

        def launch(stream: int) -> None:
            kernel.launch(stream, constants.into(_Arguments, images))

        return Binding(launch, constants=constants.all)

    def estimate_us(self, parts: FirstParts, config: Attrs, arch: Arch) -> float:
        """Products of all warpgroups of a multiprocessor, or what is moved."""
        design = self.design(parts, config)
        rows = design.rows * (2 if design.pool else 1) + (1 if design.pool else 0)
        assert arch.chip is not None
        sms = arch.chip.multiprocessors
        cost, common = arch.cost(self.name), arch.cost(COSTS)
        cycles = design.columns / cost["columns_per_cycle"] + 8
        products = rows * design.weight[2] * design.steps * cycles
        # A few blocks more than multiprocessors, and one of these has as many as it can hold.
        resident = 1 if design.blocks <= sms else design.resident
        warpgroups = max(design.groups * resident, cost["alone"])
        waves = -(-design.blocks // (sms * resident))
        busy = waves * (warpgroups * products / common["sm_cycles_per_us"] + cost["block_us"])
        return cost["launch_us"] + max(busy, parts.step.traffic_bytes / cost["bytes_per_us"])


class _Arguments(ctypes.Structure):
    """FirstConv::Arguments."""

    _fields_ = fields("x weight scale bias y")


def read_constants(parts: FirstParts, design: FirstConvDesign, frame: Frame) -> Constants:
    """The weight as products read it, scale and bias in float32; all padded with zeros."""
    (o, c, rows, s), tiles, steps = design.weight, design.tiles_o, design.steps
    wide = (tiles * TILE_O, rows, steps * 16 // design.pixel, design.pixel)

    def ordered(weight: Tensor) -> Tensor:
        padded = weight.new_zeros(wide)
        padded[:o, :, :s, :c] = weight.permute(0, 2, 3, 1)
        return padded.view(tiles, 4, 8, 2, rows, steps, 2, 8).permute(0, 4, 5, 6, 1, 3, 2, 7)

    dtype, vector = parts.step.types[parts.x].torch_dtype, floats(o, tiles * TILE_O)
    weight = Arrangement((tiles, rows, steps, 2, 4, 2, 8, 8), dtype, ordered, packs=True)
    return Constants(
        frame,
        {
            "weight": (parts.weight, weight),
            "scale": (parts.epilogue.scale, vector),
            "bias": (parts.epilogue.bias, vector),
        },
    )


def _read(step: Step) -> FirstParts:
    """The convolution, and whether a pool follows it; raises IllegalCandidate."""
    nodes = before_the_pool(step)
    epilogue = epilogue_of(step, nodes)
    more = epilogue.residual is not None or epilogue.offset is not None
    refuse({"only a scale, a bias and functions may follow the convolution": more})
    return FirstParts(step, epilogue, pool=nodes != step.nodes)


FAMILY = FirstConv()
