"""Squeeze-and-excite as autocast has it: products of 16 bits, streams of float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..conftest import Builder, Emit

F32 = "float32"
POOL = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1), "count_padding": True}


@dataclass(frozen=True)
class Tail:
    """A tail after a convolution whose result is of `image`; `residual` is in memory as it says."""

    shape: tuple[int, int, int, int] = (3, 64, 4, 4)
    hidden: int = 4
    image: str = ""
    residual: str = F32
    weights: str = ""
    saved: bool = True
    offset: bool = True
    stored: tuple[str, ...] = (F32, "narrow")
    pooled: str = ""

    def __call__(self, b: Builder) -> tuple[str, ...]:
        n, c, _, _ = self.shape
        x = self._wide(b, self.image)
        x = b("add", b("mul", x, b.w(1, dtype=F32)), b.w(1, dtype=F32))
        mean = b("mean", x, dims=(2, 3), keepdim=False)
        squeezed = mean if self.weights == F32 else b.cast(mean)
        hidden = b("relu", self._layer(b, squeezed, self.hidden, c))
        gate = b("sigmoid", self._layer(b, hidden, c, self.hidden))
        image_gate = b("reshape", gate, shape=(n, c, 1, 1))
        image_gate = image_gate if self.weights == F32 else b.wide(image_gate)
        y = b("add", b("mul", x, image_gate), self._wide(b, self.residual))
        y = relu = b("relu", y)
        left = [squeezed, hidden, gate, image_gate] if self.saved else []
        if self.offset:
            y = b("add", y, b.w(1, dtype=F32))
            left += [relu] if self.saved else []
        left += [y] if F32 in self.stored else []
        left += [b.cast(y)] if "narrow" in self.stored else []
        if self.pooled:
            pooled = b("avg_pool2d", y, **POOL)
            left.append(b.cast(pooled) if self.pooled == "narrow" else pooled)
        return tuple(left)

    def _layer(self, b: Builder, x: str, rows: int, columns: int) -> str:
        weights = self.weights or b.dtype
        y = b.linear(x, b.w(rows, columns, dtype=weights))
        return b("add_channel", y, b.w(rows, dtype=weights), axis=1)

    def _wide(self, b: Builder, dtype: str) -> str:
        return b.x(*self.shape, dtype=F32) if dtype == F32 else b.wide(b.x(*self.shape))


SE_TAIL: Mapping[str, Emit] = {
    "a wide stream": Tail(),
    "a wide stream, for inference": Tail(saved=False),
    "stored narrow": Tail(stored=("narrow",)),
    "stored wide, no offset": Tail(stored=(F32,), offset=False),
    "stored twice, no offset": Tail(offset=False),
    "pooled": Tail((3, 128, 8, 8), 8, stored=("narrow",), pooled="narrow"),
    "pooled, a large image": Tail((2, 64, 16, 16), stored=("narrow",), pooled="narrow"),
    "pooled, odd": Tail((3, 24, 5, 7), 5, image=F32, pooled=F32),
    "a wide image, a narrow residual": Tail(image=F32, residual="narrow"),
    "wide weights": Tail(weights=F32),
    "an image read twice": Tail((2, 256, 30, 31), 16),
    "odd": Tail((5, 8, 9, 9), 1, saved=False),
}


@dataclass(frozen=True)
class Gradient:
    """That of a tail: gradients `dy` arrive, the image is of `image`, the layers of `weights`; the
    gradient of the image leaves as `stored`, that of the residual as `residual`.
    """

    shape: tuple[int, int, int, int] = (3, 64, 4, 4)
    hidden: int = 4
    dy: tuple[str, ...] = ("narrow", F32)
    image: str = ""
    weights: str = ""
    residual: tuple[str, ...] = ("narrow",)
    stored: tuple[str, ...] = ("narrow",)
    layers: bool = True
    sums: bool = True

    def __call__(self, b: Builder) -> tuple[str, ...]:
        n, c, height, width = self.shape
        dy, *others = [self._wide(b, dtype) for dtype in self.dy]
        left = []
        for other in others:
            dy = b("add", dy, other)
            left += [b("sum_to", dy, shape=(1,))] if self.sums else []
        g = b("relu_grad", dy, b.x(*self.shape, dtype=F32))
        left += self._stored(b, g, self.residual)
        z, scale = self._wide(b, self.image), b.w(1, dtype=F32)
        x = b("add", b("mul", z, scale), b.w(1, dtype=F32))
        direct = b("mul", g, b.x(n, c, 1, 1, dtype=F32))
        dgate = b("sum_to", b("mul", g, x), shape=(n, c, 1, 1))
        dgate = b("reshape", dgate if self.weights == F32 else b.cast(dgate), shape=(n, c))
        dmean, layers = self._layers(b, dgate)
        dmean = dmean if self.weights == F32 else b.wide(dmean)
        spread = b("affine", dmean, alpha=1 / (height * width), beta=0.0)
        du = b("add", direct, b("reshape", spread, shape=(n, c, 1, 1)))
        if self.sums:
            left += [b("sum_to", du, shape=(1,)), b("sum_to", b("mul", du, z), shape=(1,))]
        return (*left, *layers, *self._stored(b, b("mul", du, scale), self.stored))

    def _layers(self, b: Builder, dgate: str) -> tuple[str, tuple[str, ...]]:
        n, c, _, _ = self.shape
        dx, made = dgate, list[str]()
        for function, width, depth in (("sigmoid", c, self.hidden), ("relu", self.hidden, c)):
            weights = self.weights or b.dtype
            dy = b(f"{function}_grad", dx, b.x(n, width, dtype=weights))
            weight = b.w(width, depth, dtype=weights)
            dx = b("matmul", dy, weight, transpose_a=False, transpose_b=False)
            if self.layers:
                argument = b.x(n, depth, dtype=weights)
                dw = b("matmul", dy, argument, transpose_a=True, transpose_b=False)
                db = b("sum", dy, dims=(0,), keepdim=False)
                made += [b.wide(dw), b.wide(db)] if weights != F32 else [dw, db]
        return dx, tuple(made)

    def _stored(self, b: Builder, value: str, dtypes: tuple[str, ...]) -> list[str]:
        return [value if dtype == F32 else b.cast(value) for dtype in dtypes]

    def _wide(self, b: Builder, dtype: str) -> str:
        return b.x(*self.shape, dtype=F32) if dtype == F32 else b.wide(b.x(*self.shape))


SE_GRAD: Mapping[str, Emit] = {
    "of two gradients": Gradient(),
    "of a wide gradient, a wide image": Gradient(dy=(F32,), image=F32),
    "of a narrow gradient": Gradient(dy=("narrow",)),
    "leaves wide": Gradient(residual=(F32,), stored=(F32,)),
    "leaves twice": Gradient(residual=(F32, "narrow"), stored=(F32, "narrow")),
    "wide weights": Gradient(weights=F32),
    "layers outside": Gradient(layers=False, sums=False, residual=()),
    "odd": Gradient((5, 24, 5, 7), 5),
    "an image read twice": Gradient((2, 256, 30, 31), 16),
    "many images": Gradient((131, 64, 2, 2), 8),
    "block 64": Gradient((3, 64, 16, 16), 4, image=F32),
    "block 512": Gradient((3, 512, 2, 2), 32, dy=(F32,), image=F32),
}
