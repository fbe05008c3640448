"""Convolutions and linear layers as matrix products in float32, for a reference in 16 bits.

The first convolution of a process loads cuDNN (70 ms on an H200, 2026-11-22), the first product of
each dtype a part of cuBLAS (60 to 90 ms). A proof that takes all its products in float32 needs one
part of cuBLAS: 0.25 s instead of 0.75 for se_resnet9_fixup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad
from torch.overrides import TorchFunctionMode

# Of the copies of a convolution's input: larger ones are left to the framework.
MOST_BYTES = 1 << 30
Pair = int | tuple[int, ...]


class Float32Products(TorchFunctionMode):
    """Inside, each product is taken in float32 and rounded once, to the dtype of its input."""

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        replaced = REPLACED.get(func)
        found = replaced(*args, **(kwargs or {})) if replaced is not None else None
        return func(*args, **(kwargs or {})) if found is None else found


def convolved(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> Tensor | None:
    """A convolution over images, None where it is of another kind or too large."""
    if input.dim() != 4 or groups != 1 or isinstance(padding, str):
        return None
    (down, right), (top, left), (rows_apart, apart) = map(_pair, (stride, padding, dilation))
    x = pad(input.float(), (left, left, top, top))
    o, c, r, s = weight.shape
    height = (x.shape[2] - rows_apart * (r - 1) - 1) // down + 1
    width = (x.shape[3] - apart * (s - 1) - 1) // right + 1
    n, (of_n, of_c, of_h, of_w) = x.shape[0], x.stride()
    if n * height * width * c * r * s * x.itemsize > MOST_BYTES:
        return None
    patches = x.as_strided(
        (n, height, width, c, r, s),
        (of_n, of_h * down, of_w * right, of_c, of_h * rows_apart, of_w * apart),
    )
    flat = product(patches.reshape(-1, c * r * s), weight.reshape(o, -1), bias, input.dtype)
    y = flat.view(n, height, width, o).permute(0, 3, 1, 2)
    return y.contiguous() if input.is_contiguous() and weight.is_contiguous() else y


def product(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    y = x.float() @ weight.float().t()
    return (y if bias is None else y + bias.float()).to(dtype)


def multiplied(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer."""
    return product(input, weight, bias, input.dtype)


def _pair(value: Pair) -> tuple[int, int]:
    both = (value, value) if isinstance(value, int) else (value[0], value[-1])
    return both


REPLACED: dict[Any, Callable[..., Tensor | None]] = {
    torch.conv2d: convolved,
    linear: multiplied,
}
