"""How a convolution's pixels are cut into tiles that one tensor copy can load."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

from plantune.graph import Node, Step
from plantune.kernels.patterns.epilogue import ConvEpilogue

CHUNK = 64  # channels of one step of the reduction: a swizzled row of 128 bytes
ROW_BYTES = 128
SWIZZLE_BYTES = 1024  # rows after which the swizzle's pattern repeats
BOX_SIDE_MAX = 256  # of a tensor copy, in elements of the tensor


@dataclass(frozen=True)
class ConvShape:
    """The sizes of a convolution: image, kernel, output. Where `phases` tell the pixels of the
    output apart, only every so many rows and columns of them are read by the same taps: it is the
    gradient of a convolution with that stride, and has the stride 1.
    """

    n: int
    c: int
    h: int
    w: int
    o: int
    r: int
    s: int
    p: int
    q: int
    stride: tuple[int, int]
    padding: tuple[int, int]
    phases: tuple[int, int] = (1, 1)

    @property
    def members(self) -> dict[str, int]:
        """What headers ask of it."""
        sizes = {f"k{word.upper()}": getattr(self, word) for word in "nchworspq"}
        strides = dict(zip(("kStrideH", "kStrideW"), self.stride, strict=True))
        return {**sizes, **strides, **dict(zip(("kPadH", "kPadW"), self.padding, strict=True))}

    @property
    def phase_p(self) -> int:
        """Rows of the largest phase."""
        return -(-self.p // self.phases[0])

    @property
    def phase_q(self) -> int:
        return -(-self.q // self.phases[1])

    @property
    def margin(self) -> tuple[int, int]:
        """Columns and rows that taps read beyond a box; with a stride, those that share a box."""
        rows, columns = (p * s for p, s in zip(self.phases, self.stride, strict=True))
        return -(-self.s // columns) - 1, -(-self.r // rows) - 1

    @property
    def chunks(self) -> int:
        return -(-self.c // CHUNK)

    def taps(self, box: Box) -> tuple[int, int]:
        """The most taps that read the image in one tile, and their sum over an image's tiles."""
        steps = tuple(zip(self.stride, self.padding, self.phases, strict=True))
        rows = _taps(self.p, box.h, self.h, self.r, *steps[0])
        columns = _taps(self.q, box.w, self.w, self.s, *steps[1])
        return rows[0] * columns[0], rows[1] * columns[1]

    def tiles(self, box: Box) -> int:
        return -(-self.n // box.n) * self.tiles_of_image(box)

    def tiles_of_image(self, box: Box) -> int:
        return math.prod(self.phases) * -(-self.phase_p // box.h) * -(-self.phase_q // box.w)


class Box(NamedTuple):
    """The output pixels of a tile."""

    w: int
    h: int
    n: int


def conv_shape(step: Step, epilogue: ConvEpilogue) -> ConvShape:
    x, w = (step.types[name].shape for name in epilogue.conv.inputs)
    (n, c, h, width), (o, _, r, s) = x, w
    p, q = step.types[epilogue.conv.name].shape[2:]
    attrs = epilogue.conv.attrs
    return ConvShape(n, c, h, width, o, r, s, p, q, attrs["stride"], attrs["padding"])


@cache
def dense_box(shape: ConvShape, tile_m: int, gathered: tuple[int, int] | None = None) -> Box:
    """The box of at most `tile_m` pixels that leaves the least to do; where another image is
    `gathered`, with the margin of columns and rows that its box has.

    Small images are best cut place by place: at a corner most taps read padding, and are left out.
    """
    boxes = (
        Box(w, h, min(shape.n, tile_m // (w * h)))
        for w, h in itertools.product(_parts(shape.phase_q, tile_m), _parts(shape.phase_p, tile_m))
        if w * h <= tile_m and max(w * shape.stride[1], h * shape.stride[0]) <= BOX_SIDE_MAX
    )

    def work(box: Box) -> tuple[float, ...]:
        most, total = shape.taps(box)
        if gathered is not None:
            pixels = (box.w + gathered[0]) * (box.h + gathered[1]) * box.n
            steps = shape.chunks * total / shape.tiles_of_image(box) + pixels / tile_m
            return shape.tiles(box) * steps, -box.w, -box.h
        return shape.tiles(box) * most, -(-shape.n // box.n) * total, -box.w, -box.h

    return min(boxes, key=work)


@cache
def reused_box(shape: ConvShape, tile_m: int) -> Box | None:
    """The box of 8x8 pixels whose margins weigh least, None if no such box can be copied."""
    atoms = tile_m // 64
    boxes = (
        Box(8 * w, 8 * h, atoms // (w * h))
        for w, h in itertools.product(range(1, atoms + 1), repeat=2)
        if atoms % (w * h) == 0
    )
    margin = shape.margin
    fitting = [b for b in boxes if max(b.w + margin[0], b.h + margin[1]) <= BOX_SIDE_MAX]

    def work(box: Box) -> tuple[int, int]:
        return shape.tiles(box), copied_pixels(shape, box, reuse=True)

    return min(fitting, key=work, default=None)


def copied_pixels(shape: ConvShape, box: Box, *, reuse: bool) -> int:
    """Pixels that one copy for a box brings: with reuse, its margin too."""
    if not reuse:
        return box.w * box.h * box.n
    return (box.w + shape.margin[0]) * (box.h + shape.margin[1]) * box.n


def _parts(size: int, most: int) -> list[int]:
    """Lengths that cut `size` into parts with the least rest."""
    return sorted({-(-size // count) for count in range(1, size + 1)} & {*range(1, most + 1)})


@lru_cache(1 << 14)  # thousands of configs ask for a few
def _taps(
    outputs: int, part: int, size: int, kernel: int, stride: int, padding: int, phases: int
) -> tuple[int, int]:
    """How many taps read more than padding in a part along one axis of the output: the most of a
    part, and their sum over all.
    """
    counts = []
    for phase in range(phases):
        first_tap = (padding - phase) % phases
        taps, pad = -(-(kernel - first_tap) // phases), (padding - phase - first_tap) // phases
        pixels = -(-(outputs - phase) // phases)
        for first in range(0, -(-outputs // phases), part):
            last = min(first + part, pixels) - 1
            begin = max(0, pad - last * stride)
            end = min(taps, size + pad - first * stride)
            counts.append(max(0, end - begin))
    return max(counts), sum(counts)


NO_POOL: dict[str, Any] = {
    **{"kGathers": False, "kPoolR": 1, "kPoolS": 1, "kPoolPadH": 0, "kPoolPadW": 0},
    "kPoolScale": 1.0,
}


@dataclass(frozen=True)
class PoolGather:
    """The pool's windows; its phases are those of the convolution."""

    kernel: tuple[int, int]
    padding: tuple[int, int]
    phases: tuple[int, int]

    @staticmethod
    def of(pool: Node) -> PoolGather:
        attrs: Any = pool.attrs
        return PoolGather(attrs["kernel"], attrs["padding"], attrs["stride"])

    @property
    def margin(self) -> tuple[int, int]:
        """Columns and rows of the pool's result that a box of a phase reads beyond its own."""
        rows, columns = (
            -(-size // phases) - 1 for size, phases in zip(self.kernel, self.phases, strict=True)
        )
        return columns, rows

    def sides(self, box: Box) -> tuple[int, int]:
        return box.w + self.margin[0], box.h + self.margin[1]

    def pixels(self, box: Box) -> int:
        w, h = self.sides(box)
        return w * h * box.n

    def shared_bytes(self, box: Box, channels: int, element_bytes: int = 2) -> int:
        """The shared memory for a number of channels, in boxes of up to 128 bytes."""
        boxes = -(-channels * element_bytes // ROW_BYTES)
        copied = self.pixels(box) * channels // boxes * element_bytes
        return boxes * -(-copied // SWIZZLE_BYTES) * SWIZZLE_BYTES

    @property
    def members(self) -> dict[str, Any]:
        """What headers ask of it."""
        (r, s), (pad_h, pad_w) = self.kernel, self.padding
        sizes = {"kPoolR": r, "kPoolS": s, "kPoolPadH": r - 1 - pad_h, "kPoolPadW": s - 1 - pad_w}
        return {"kGathers": True, **sizes, "kPoolScale": 1 / (r * s)}
