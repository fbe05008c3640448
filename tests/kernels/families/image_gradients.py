"""Steps that are the gradient of an image, with what may follow it."""

from __future__ import annotations

from dataclasses import dataclass

MASKED = ("add", "relu_grad")
# What the network does after the second convolution of a block, after the first with stride 2, and
# after the first of all.
SECOND = ("all", "relu_grad", "all")
FIRST = ("add", "all", "relu_grad")
POOLED = ("pool", "all", "relu_grad")
EARLIEST = ("all", "add", "relu_grad")
APART = ("all", "apart_grad", "all")
POOLED_APART = ("pool", "all", "apart_grad")
SUMS = {
    "all": ("sum_to", {"shape": (1,)}),
    "channels": ("sum", {"dims": (0, 2, 3), "keepdim": False}),
    "images": ("sum", {"dims": (2, 3), "keepdim": False}),
}


@dataclass(frozen=True)
class Gradient:
    """The gradient of an image of `c` channels; `leaves` is a value on the way that is read. Parts
    that are sums add what the part before them makes.
    """

    n: int = 2
    c: int = 64
    size: tuple[int, int] = (8, 8)
    o: int = 64
    kernel: int = 3
    stride: int = 1
    padding: int | None = None
    groups: int = 1
    parts: tuple[str, ...] = ()
    leaves: str = ""
    pool: tuple[int, int] = (3, 1)
    counted: bool = True

    def __call__(self, b):
        padding = self.kernel // 2 if self.padding is None else self.padding
        shape = (self.n, self.c, *self.size)
        result = [(s + 2 * padding - self.kernel) // self.stride + 1 for s in self.size]
        dy = b.x(self.n, self.o, *result)
        w = b.w(self.o, self.c // self.groups, self.kernel, self.kernel)
        pair = {"stride": (self.stride,) * 2, "padding": (padding,) * 2, "dilation": (1, 1)}
        values = {"conv": b("conv2d_dgrad", dy, w, groups=self.groups, shape=shape, **pair)}
        last, sums = values["conv"], []
        for part in self.parts:
            if part in SUMS:
                op, attrs = SUMS[part]
                sums.append(b(op, last, **attrs))
            elif part == "mul":
                last = b("mul", last, b.w(1))
            elif part == "itself":
                last = b("add", last, last)
            elif part == "pool":
                last = b("add", self.pooled(b, shape), last)
            elif part == "apart_grad":
                last = b(part, last, b.x(*shape), b.w(1))
            elif part == "swapped":
                last = b("relu_grad", b.x(*shape), last)
            else:
                last = b(part, last, b.x(*shape))
            values[part] = last
        return (last, *(values[name] for name in self.leaves.split()), *sums)

    def pooled(self, b, shape):
        """The gradient of a pool of the same image."""
        kernel, padding = self.pool
        sizes = [(size + 2 * padding - kernel) // self.stride + 1 for size in self.size]
        attrs = {"kernel": (kernel,) * 2, "padding": (padding,) * 2, "stride": (self.stride,) * 2}
        dy = b.x(self.n, self.c, *sizes)
        return b("avg_pool2d_grad", dy, shape=shape, count_padding=self.counted, **attrs)
