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
