"""Steps that are the gradient of a convolution's weight."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gradient:
    """The gradient of a weight of `o` by `c` channels."""

    n: int = 2
    c: int = 64
    size: tuple[int, int] = (8, 8)
    o: int = 64
    kernel: int = 3
    stride: int = 1
    padding: int | None = None
    groups: int = 1
    dilation: int = 1

    def __call__(self, b):
        padding = self.kernel // 2 if self.padding is None else self.padding
        span = self.dilation * (self.kernel - 1) + 1
        result = [(side + 2 * padding - span) // self.stride + 1 for side in self.size]
        pairs = {"stride": self.stride, "padding": padding, "dilation": self.dilation}
        return b(
            "conv2d_wgrad",
            b.x(self.n, self.o, *result),
            b.x(self.n, self.c, *self.size),
            shape=(self.o, self.c // self.groups, self.kernel, self.kernel),
            groups=self.groups,
            **{name: (value, value) for name, value in pairs.items()},
        )
