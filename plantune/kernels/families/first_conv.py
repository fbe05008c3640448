"""The convolution that reads an image of few channels, with its max pool: `first_conv.h`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from plantune.canonical import Attrs
from plantune.cuda.kernel import Kernel
from plantune.errors import IllegalCandidate
from plantune.graph.graph import Node
from plantune.graph.step import Step
from plantune.kernels.constants import Constant
from plantune.kernels.family import Binding, Frame, images
from plantune.kernels.hopper.family import SM_CYCLES_PER_US, SMS, WarpgroupFamily
from plantune.kernels.hopper.products import ELEMENTS, product
from plantune.kernels.patterns.epilogue import ConvEpilogue, epilogue_of
from plantune.kernels.vector_kernel import members
from plantune.space.arch import Arch

WARPGROUP, TILE_O, UNIT_BYTES = 128, 64, 16
WARPGROUPS = 3  # of a multiprocessor
# Beyond that, sums of a row of pixels leave no registers for what fetches the next one.
COLUMNS_MAX = 128
# A strip may be so high whatever the image is.
ROWS_MIN = 4
# Of a multiprocessor, in units of 64 rows by 16 products.
COLUMNS_PER_CYCLE = 2.0
POOL = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1)}
SOURCE = """#include "cuda/first_conv.h"
{product}struct Conv {{
  using T = {element};
  static constexpr int kN = {n}, kC = {c}, kH = {h}, kW = {w}, kO = {o}, kP = {p}, kQ = {q};
  static constexpr int kR = {r}, kS = {s};
  static constexpr int kStrideH = {stride[0]}, kStrideW = {stride[1]};
  static constexpr int kPadH = {padding[0]}, kPadW = {padding[1]};
  static constexpr int kOutH = {out[0]}, kOutW = {out[1]};
  static constexpr int kColumns = {columns}, kTilesW = {tiles_w};
  static constexpr int kRows = {rows}, kGroups = {groups};
  static constexpr bool kPool = {pool}, kScale = {scale};
  static constexpr bool kBias = {bias}, kRelu = {relu}, kNhwc = {nhwc};
}};
using Kernel = plantune::FirstConv<Conv>;
static_assert(Kernel::kThreads == {threads} && Kernel::kSharedBytes == {shared_bytes} &&
                  Kernel::kBlocks == {blocks},
              "what is launched is what was planned");
extern "C" __global__ void __launch_bounds__(Kernel::kThreads, {resident})
    run(const __grid_constant__ Kernel::Arguments arguments) {{
  Kernel::run(arguments);
}}
"""


@dataclass(frozen=True)
class Design:
    """Sizes of the problem, and of what a warpgroup makes of it."""

    epilogue: ConvEpilogue
    pool: bool
    x: tuple[int, ...]
    weight: tuple[int, ...]
    conv: tuple[int, ...]
    out: tuple[int, ...]
    rows: int
    groups: int

    @staticmethod
    def of(step: Step, config: Attrs) -> Design:
        """Raises IllegalCandidate where the step is something else."""
        epilogue, pool = _read(step)
        types = step.types
        x, weight = (types[name].shape for name in epilogue.conv.inputs)
        conv, out = types[epilogue.conv.name].shape, types[step.nodes[-1].name].shape
        return Design(
            epilogue, pool, x, weight, conv, out, config["rows"], config["threads"] // WARPGROUP
        )

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
        """Of 16 products, for a row of the filter."""
        return -(-self.weight[3] * self.pixel // 16)

    @property
    def tiles_w(self) -> int:
        return next(n for n in range(1, self.conv[3] + 1) if self._columns(n) <= COLUMNS_MAX)

    @property
    def columns(self) -> int:
        """Pixels of a row of the convolution that a warpgroup makes at once."""
        return self._columns(self.tiles_w)

    def _columns(self, tiles: int) -> int:
        """A pool reads a pair of the tile before, too."""
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
        element = ELEMENTS[dtype]
        sizes = {"n": n, "c": c, "h": h, "w": w, "o": o, "p": p, "q": q, "r": r, "s": s}
        own = ("columns", "tiles_w", "rows", "groups", "stride", "threads", "shared_bytes")
        flags = {
            "pool": self.pool,
            "scale": self.epilogue.scale is not None,
            "bias": self.epilogue.bias is not None,
            "relu": self.epilogue.relu,
            "nhwc": layout == "nhwc",
        }
        return SOURCE.format(
            product=product(dtype, self.columns),
            element=element,
            out=self.out[2:],
            padding=self.epilogue.conv.attrs["padding"],
            blocks=self.blocks,
            resident=self.resident,
            **sizes,
            **{key: getattr(self, key) for key in own},
            **{key: str(flag).lower() for key, flag in flags.items()},
        )


class FirstConv(WarpgroupFamily):
    """Config: the image's `layout`; the warpgroups of `threads` make `rows` rows each."""

    name: ClassVar = "first_conv"

    def design(self, step: Step, config: Attrs) -> Design:
        return Design.of(step, config)

    def why_not_step(self, step: Step) -> str | None:
        try:
            epilogue, _ = _read(step)
        except IllegalCandidate as reason:
            return str(reason)
        return _why_not(step, epilogue)

    def why_not_config(self, step: Step, config: Attrs, arch: Arch) -> str | None:
        design = Design.of(step, config)
        if config["rows"] >= 2 * max(design.out[2], ROWS_MIN):
            return f"{config['rows']} rows are far more than the {design.out[2]} that there are"
        return super().why_not_config(step, config, arch)

    def layouts(self, step: Step, config: Attrs) -> Mapping[str, str]:
        return {**images(step, "nhwc"), step.nodes[0].inputs[0]: config["layout"]}

    def source(self, step: Step, config: Attrs, arch: Arch) -> str:
        dtype = step.types[step.nodes[0].inputs[0]].dtype
        return Design.of(step, config).source(dtype, config["layout"])

    def bind(self, step: Step, config: Attrs, frame: Frame) -> Binding:
        design, values = Design.of(step, config), frame.values
        x, y = step.nodes[0].inputs[0], step.nodes[-1].name
        packed = Packed(design, values[y].dtype, frame)
        kernel = Kernel(frame.built)

        def launch(stream: int) -> None:
            kernel.launch(
                stream,
                (design.blocks, 1, 1),
                design.threads,
                [members(values[x].data_ptr(), *packed.addresses(), values[y].data_ptr())],
                shared_bytes=design.shared_bytes,
                programmatic=True,
            )

        return Binding(launch, constants=packed.constants)

    def estimate_us(self, step: Step, config: Attrs) -> float:
        """Products of all warpgroups of a multiprocessor, or what is moved."""
        design = Design.of(step, config)
        rows = design.rows * (2 if design.pool else 1) + (1 if design.pool else 0)
        products = rows * design.weight[2] * design.steps * (design.columns / COLUMNS_PER_CYCLE + 8)
        warpgroups = design.groups * design.resident
        waves = -(-design.blocks // (SMS * design.resident))
        busy = waves * (warpgroups * products / SM_CYCLES_PER_US + 3.0)
        return self.launch_us + max(busy, self.traffic_bytes(step) / self.bytes_per_us)


class Packed:
    """The weight as products read it, scale and bias in float32; all padded with zeros."""

    def __init__(self, design: Design, dtype: torch.dtype, frame: Frame) -> None:
        self._design = design
        epilogue, o = design.epilogue, design.weight[0]
        channels, steps, rows = design.tiles_o * TILE_O, design.steps, design.weight[2]
        shape = (design.tiles_o, rows, steps, 2, 4, 2, 8, 8)
        weight = torch.empty(shape, dtype=dtype, device=frame.device)
        self._vectors = torch.zeros(2, channels, dtype=torch.float32, device=frame.device)
        named = zip((epilogue.scale, epilogue.bias), self._vectors, strict=True)
        self.constants = (
            Constant(frame.values, epilogue.conv.inputs[1], weight, self.ordered, packs=True),
            *(Constant(frame.values, name, row[:o]) for name, row in named if name is not None),
        )

    def ordered(self, weight: torch.Tensor) -> torch.Tensor:
        (o, c, rows, s), design = self._design.weight, self._design
        sizes = (design.tiles_o * TILE_O, rows, design.steps * 16 // design.pixel, design.pixel)
        wide = weight.new_zeros(sizes)
        wide[:o, :, :s, :c] = weight.permute(0, 2, 3, 1)
        parts = wide.view(design.tiles_o, 4, 8, 2, rows, design.steps, 2, 8)
        return parts.permute(0, 4, 5, 6, 1, 3, 2, 7)

    def addresses(self) -> tuple[int, int, int]:
        scale, bias = self._vectors
        return self.constants[0].tensor.data_ptr(), scale.data_ptr(), bias.data_ptr()


def _read(step: Step) -> tuple[ConvEpilogue, bool]:
    """The convolution, and whether a pool follows it; raises IllegalCandidate."""
    *before, last = step.nodes
    pooled = bool(before) and last.op == "max_pool2d"
    epilogue = epilogue_of(step, before if pooled else step.nodes)
    if pooled:
        _require_pool(last, before[-1])
    extra = (epilogue.residual, epilogue.offset)
    if any(part is not None for part in extra):
        raise IllegalCandidate("only a scale, a bias and ReLU may follow the convolution")
    return epilogue, pooled


def _require_pool(pool: Node, before: Node) -> None:
    if pool.inputs[0] != before.name:
        raise IllegalCandidate("the pool does not read the convolution")
    if {key: pool.attrs[key] for key in POOL} != POOL:
        raise IllegalCandidate("only a pool of 3x3 with stride 2 and padding 1")


def _why_not(step: Step, epilogue: ConvEpilogue) -> str | None:
    attrs, dtype = epilogue.conv.attrs, step.types[epilogue.conv.inputs[0]].dtype
    (n, c, h, w), (o, *_) = (step.types[name].shape for name in epilogue.conv.inputs)
    width, columns = attrs["stride"][1], step.types[step.nodes[-1].name].shape[3]
    reasons = {
        f"a warpgroup multiplies float16 or bfloat16, got {dtype}": dtype not in ELEMENTS,
        "only convolutions without groups and dilation": attrs["groups"] != 1
        or attrs["dilation"] != (1, 1),
        f"pixels 16 bytes apart need a stride of 1, 2 or 4, got {width}": width not in (1, 2, 4),
        f"{width} pixels of {c} channels take more than 16 bytes": c * width > 8,
        f"a thread writes two channels, {o} do not divide": o % 2 != 0,
        "there is nothing to compute": min(n, c, o) == 0,
        "elements of an image are counted in 31 bits": c * h * w >= 1 << 31,
        "elements of a row of the result are counted in 31 bits": o * columns >= 1 << 31,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


FAMILY = FirstConv()
