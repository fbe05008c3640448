"""oneDNN convolution into given memory, as torch offers it.

The operator adds to its destination, so it needs no memory of its own: the destination holds zeros
or a residual before it. It runs float32 and bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plantune.canonical import Attrs

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Geometry:
    """What the operator asks for beside its tensors."""

    padding: tuple[int, ...] = (0, 0)
    stride: tuple[int, ...] = (1, 1)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1

    @staticmethod
    def of(attrs: Attrs) -> Geometry:
        """The geometry of a conv2d node."""
        return Geometry(attrs["padding"], attrs["stride"], attrs["dilation"], attrs["groups"])

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (list(self.padding), list(self.stride), list(self.dilation), self.groups)


def is_there() -> bool:
    """Whether this torch was built with oneDNN."""
    return bool(torch.backends.mkldnn.is_available())


def runs_bfloat16() -> bool:
    """Whether this CPU has the instructions that oneDNN needs for it."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def why_not_dtype(dtype: str) -> str | None:
    """Why convolutions of a dtype do not run on this CPU, or None if they do."""
    if dtype not in DTYPES:
        return f"oneDNN runs {' and '.join(DTYPES)}, not {dtype}"
    if dtype == "bfloat16" and not runs_bfloat16():
        return "oneDNN runs bfloat16 on CPUs with AVX-512 or AVX-NE-CONVERT alone"
    return None


def pack(weight: Tensor, geometry: Geometry, image_shape: Sequence[int]) -> Tensor:
    """The weight in oneDNN's own layout for images of that shape."""
    reorder = torch.ops.mkldnn._reorder_convolution_weight
    packed: Tensor = reorder(weight, *geometry.arguments, list(image_shape))
    return packed


def add_convolution(
    target: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
) -> None:
    """target += conv(x, weight) + bias."""
    run = torch.ops.mkldnn._convolution_pointwise_.binary
    run(target, x, weight, bias, *geometry.arguments, "add", 1.0, None, [], None)
