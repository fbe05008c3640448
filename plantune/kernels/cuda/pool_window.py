"""The windows of a pool, as its kernels read them: `csrc/cuda/pool_window.h`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from plantune.base.canonical import Attrs
from plantune.graph import Node, TensorType
from plantune.graph.types import DTYPES
from plantune.kernels.cuda import vector_kernel
from plantune.kernels.rendering import struct

# Tiles of a thread: of larger windows, or of more columns, a row does not fit into its registers.
TILED_MAX, READ_MAX, TILE_ROWS = 5, 6, 8
# Fewer threads leave multiprocessors without work: they make one pixel each.
THREADS_MIN = 1 << 16


@dataclass(frozen=True)
class PoolWindow:
    """The pool from `x` to `y` that `node` is, or is the gradient of; what it reads is of `dtype`,
    what it makes maybe of another one.
    """

    node: Node
    x: TensorType
    y: TensorType
    dtype: str
    made: str = ""
    places: bool = False  # whether a max pool's are wanted

    def taken(self, config: Attrs) -> int:
        """Channels that a thread takes: what divides all, no more than a vector has."""
        if config["layout"] != "nhwc":
            return 1
        return math.gcd(vector_kernel.VECTOR_BYTES // DTYPES[self.dtype].itemsize, self.x.shape[1])

    def tile(self, config: Attrs) -> tuple[int, int]:
        """Rows and columns of pixels that a thread makes: many, if windows share most of what they
        cover and there are threads enough for the chip.
        """
        attrs: Any = self.node.attrs
        shared = all(2 * s < size for size, s in zip(attrs["kernel"], attrs["stride"], strict=True))
        if not shared or max(attrs["kernel"]) > TILED_MAX:
            return 1, 1
        columns = self._columns(config)
        threads = self.y.numel // (self.taken(config) * TILE_ROWS * columns)
        enough = threads >= THREADS_MIN and self.y.shape[2] >= TILE_ROWS
        return (TILE_ROWS, columns) if enough else (1, 1)

    def _columns(self, config: Attrs) -> int:
        """Of a tile: as many as registers have room for, with all that they are made of."""
        attrs: Any = self.node.attrs
        sums = DTYPES[self.dtype].itemsize == 2 and not self.node.op.startswith("max")
        if sums or self.places or config["layout"] == "nchw":
            return 1
        narrow = attrs["kernel"][1] + 3 * attrs["stride"][1] <= READ_MAX
        return 4 if narrow and self.taken(config) > 1 else 2

    def threads(self, config: Attrs) -> int:
        """How many threads there are, each with its tile."""
        (n, channels, height, width), (rows, columns) = self.y.shape, self.tile(config)
        return n * channels // self.taken(config) * -(-height // rows) * -(-width // columns)

    def read(self, config: Attrs) -> tuple[float, float]:
        """Elements that are read, and those that are compared or added, for each that is made."""
        attrs: Any = self.node.attrs
        (rows, columns), (taps_down, taps_along) = self.tile(config), attrs["kernel"]
        down, along = attrs["stride"]
        if (rows, columns) == (1, 1):
            return taps_down * taps_along, taps_down * taps_along
        in_rows, in_columns = (rows - 1) * down + taps_down, (columns - 1) * along + taps_along
        return in_rows * in_columns / (rows * columns), in_rows / rows * taps_along + taps_down

    def source(self, config: Attrs, vector: int | None = None) -> str:
        """The header's Window; a thread takes `vector` channels, or as many as it can."""
        attrs: Any = self.node.attrs
        (_, channels, height, width), (*_, out_height, out_width) = self.x.shape, self.y.shape
        pairs = {"": attrs["kernel"], "Stride": attrs["stride"], "Padding": attrs["padding"]}
        return struct(
            "Window",
            T=vector_kernel.ELEMENTS[self.dtype],
            Made=vector_kernel.ELEMENTS[self.made or self.dtype],
            Index=vector_kernel.index_of(max(self.x.numel, self.y.numel)),
            kMax=self.node.op.startswith("max"),
            kTaps="taps" in self.node.op,
            kCountPadding=bool(attrs.get("count_padding")),
            kNhwc=config["layout"] == "nhwc",
            kVector=vector or self.taken(config),
            kThreads=config["threads"],
            kPlaces=self.places,
            **dict(zip(("kTileRows", "kTileColumns"), self.tile(config), strict=True)),
            **{"kChannels": channels, "kHeight": height, "kWidth": width},
            **{"kOutHeight": out_height, "kOutWidth": out_width},
            **{f"kRow{word}" if word else "kRows": pair[0] for word, pair in pairs.items()},
            **{f"kColumn{word}" if word else "kColumns": pair[1] for word, pair in pairs.items()},
        )
