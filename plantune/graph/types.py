"""What a value of the layer graph is: shape, dtype, layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from plantune.base.canonical import words
from plantune.errors import InvalidGraph

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in words("float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool")
}
LAYOUTS = ("nchw", "nhwc")


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape, dtype and layout of one value.

    `nchw` is row-major in the order of the shape, whatever its rank; `nhwc` is channels-last and
    exists for rank 4 only. In a graph the layout says what a caller passes or gets at the edge;
    inside, each step's candidate decides.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    layout: str = "nchw"

    def __post_init__(self) -> None:
        if not all(type(size) is int and size >= 0 for size in self.shape):
            raise InvalidGraph(f"shape {self.shape!r}: sizes must be integers, 0 or more")
        if self.dtype not in DTYPES:
            raise InvalidGraph(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.layout not in LAYOUTS:
            raise InvalidGraph(f"layout {self.layout!r} is not one of {', '.join(LAYOUTS)}")
        if self.layout == "nhwc" and len(self.shape) != 4:
            raise InvalidGraph(f"layout nhwc needs rank 4, got shape {self.shape}")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def size_bytes(self) -> int:
        return self.numel * self.torch_dtype.itemsize

    @property
    def is_float(self) -> bool:
        return self.torch_dtype.is_floating_point

    def strides(self, layout: str) -> tuple[int, ...]:
        """Element strides of this value when it is stored in `layout`."""
        order = (0, 2, 3, 1) if layout == "nhwc" else tuple(range(len(self.shape)))
        strides = [0] * len(self.shape)
        step = 1
        for axis in reversed(order):
            strides[axis] = step
            step *= max(self.shape[axis], 1)
        return tuple(strides)

    def to_json(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "dtype": self.dtype, "layout": self.layout}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> TensorType:
        return TensorType(tuple(data["shape"]), data["dtype"], data["layout"])


def dtype_name(dtype: torch.dtype) -> str:
    """The graph's word for a torch dtype."""
    for name, known in DTYPES.items():
        if known is dtype:
            return name
    raise InvalidGraph(f"{dtype} is not one of {', '.join(DTYPES)}")
