"""A residual that is the gradient of an average pool, gathered in the epilogue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plantune.graph.graph import Node
from plantune.kernels.hopper.tiles import CHUNK, SWIZZLE_BYTES, Box

SOURCE = """  static constexpr bool kGathers = {gathers};
  static constexpr int kPoolR = {r}, kPoolS = {s}, kPoolPadH = {pad_h}, kPoolPadW = {pad_w};
  static constexpr float kPoolScale = {scale!r}f;
"""
NO_POOL = SOURCE.format(gathers="false", r=1, s=1, pad_h=0, pad_w=0, scale=1.0)


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

    def shared_bytes(self, box: Box, channels: int) -> int:
        """Of so many channels, in boxes of up to 64."""
        boxes = -(-channels // CHUNK)
        copied = self.pixels(box) * channels // boxes * 2
        return boxes * -(-copied // SWIZZLE_BYTES) * SWIZZLE_BYTES

    @property
    def source(self) -> str:
        """What a kernel is instantiated with."""
        (r, s), (pad_h, pad_w) = self.kernel, self.padding
        return SOURCE.format(
            gathers="true", r=r, s=s, pad_h=r - 1 - pad_h, pad_w=s - 1 - pad_w, scale=1 / (r * s)
        )
