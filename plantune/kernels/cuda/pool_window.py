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

    def taken(self, config: Attrs) -> int:
        """Channels that a thread takes: what divides all, no more than a vector has."""
        if config["layout"] != "nhwc":
            return 1
        return math.gcd(vector_kernel.VECTOR_BYTES // DTYPES[self.dtype].itemsize, self.x.shape[1])

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
            **{"kChannels": channels, "kHeight": height, "kWidth": width},
            **{"kOutHeight": out_height, "kOutWidth": out_width},
            **{f"kRow{word}" if word else "kRows": pair[0] for word, pair in pairs.items()},
            **{f"kColumn{word}" if word else "kColumns": pair[1] for word, pair in pairs.items()},
        )
