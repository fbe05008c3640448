"""What `csrc/cuda/pool_window.h` is told of a pool or its gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass

from plantune.canonical import Attrs
from plantune.graph import Node, TensorType
from plantune.kernels.rendering import cxx_bool
from plantune.kernels.vector_kernel import ELEMENTS, index_of, width

SOURCE = """struct Window {{
  using T = {element};
  using Index = {index};
  static constexpr bool kMax = {is_max}, kTaps = {taps};
  static constexpr bool kCountPadding = {count_padding}, kNhwc = {nhwc};
  static constexpr int kVector = {vector}, kThreads = {threads}, kChannels = {x[1]};
  static constexpr int kHeight = {x[2]}, kWidth = {x[3]};
  static constexpr int kOutHeight = {y[2]}, kOutWidth = {y[3]};
  static constexpr int kRows = {kernel[0]}, kColumns = {kernel[1]};
  static constexpr int kRowStride = {stride[0]}, kColumnStride = {stride[1]};
  static constexpr int kRowPadding = {padding[0]}, kColumnPadding = {padding[1]};
}};
"""


@dataclass(frozen=True)
class PoolWindow:
    """The pool from `x` to `y` that `node` is, or is the gradient of."""

    node: Node
    x: TensorType
    y: TensorType

    def taken(self, config: Attrs) -> int:
        """Channels that a thread takes: what divides all, no more than a vector has."""
        if config["layout"] != "nhwc":
            return 1
        return math.gcd(width(self.x), self.x.shape[1])

    def source(self, config: Attrs, vector: int | None = None) -> str:
        """The header's Window; a thread takes `vector` channels, or as many as it can."""
        attrs = self.node.attrs
        return SOURCE.format(
            element=ELEMENTS[self.x.dtype],
            index=index_of(max(self.x.numel, self.y.numel)),
            is_max=cxx_bool(self.node.op.startswith("max")),
            taps=cxx_bool("taps" in self.node.op),
            count_padding=cxx_bool(attrs.get("count_padding")),
            nhwc=cxx_bool(config["layout"] == "nhwc"),
            vector=vector or self.taken(config),
            threads=config["threads"],
            **{"x": self.x.shape, "y": self.y.shape},
            **{key: attrs[key] for key in ("kernel", "stride", "padding")},
        )
