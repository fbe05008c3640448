"""How the parts of a weight's gradient are added, as `csrc/cuda/wgrad_sum.h` does it."""

from __future__ import annotations

from dataclasses import dataclass

# Channels and threads of a block that adds parts.
CHANNELS, THREADS = 32, 768


@dataclass(frozen=True)
class PartSum:
    """`parts` of the gradient of `o` by `c` channels and so many `taps`, in float32."""

    parts: int
    taps: int
    o: int
    c: int

    @property
    def vectors(self) -> int:
        """Of four sums, that a block makes of one row."""
        return self.taps * CHANNELS // 4

    @property
    def ways(self) -> int:
        """Threads that share an element."""
        return max(min(self.parts, THREADS // self.vectors), 1)

    @property
    def rows(self) -> int:
        """Where few parts are added, a block does so for several rows."""
        return max(THREADS // (self.vectors * self.ways) // 2, 1)

    @property
    def threads(self) -> int:
        return self.vectors * self.ways * self.rows

    @property
    def blocks(self) -> int:
        return -(-self.o // self.rows) * -(-self.c // CHANNELS)

    @property
    def bytes(self) -> int:
        """Of all parts."""
        return 4 * self.parts * self.taps * self.o * self.c

    @property
    def members(self) -> str:
        """What the header's class C says of them."""
        return (
            f"static constexpr int kSumChannels = {CHANNELS}, kSumWays = {self.ways};\n"
            f"  static constexpr int kSumRows = {self.rows}, kSplitK = {self.parts};"
        )
