"""Convolutions and linear layers of references as products of matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad
from torch.overrides import TorchFunctionMode

# Of the copies of a convolution's input: larger ones are left to the framework.
MOST_BYTES = 1 << 30
# Up to so many pixels torch's way in float64 on a CPU, image by image, takes longer: six times on
# 2x2 images of 512 channels.
SMALL_PIXELS = 16
Pair = int | tuple[int, ...]


class Products(TorchFunctionMode):
    """Inside, products of inputs for which `suits` is true of their patches are taken in `dtype`,
    and rounded once, to the dtype of the input.
    """

    def __init__(self, dtype: torch.dtype, suits: Callable[[Tensor, Tensor], bool]) -> None:
        super().__init__()
        self._dtype, self._suits = dtype, suits

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        replaced = {torch.conv2d: self._convolved, linear: self._multiplied}.get(func)
        found = replaced(*args, **(kwargs or {})) if replaced is not None else None
        return func(*args, **(kwargs or {})) if found is None else found

    def _convolved(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Pair = 1,
        padding: Pair | str = 0,
        dilation: Pair = 1,
        groups: int = 1,
    ) -> Tensor | None:
        """A convolution over images, None if it is of another kind or does not suit."""
        if input.dim() != 4 or groups != 1 or isinstance(padding, str) or not input.numel():
            return None
        (down, right), (top, left), (rows_apart, apart) = map(_pair, (stride, padding, dilation))
        x = pad(input.to(self._dtype), (left, left, top, top))
        o, c, r, s = weight.shape
        height = (x.shape[2] - rows_apart * (r - 1) - 1) // down + 1
        width = (x.shape[3] - apart * (s - 1) - 1) // right + 1
        n, (of_n, of_c, of_h, of_w) = x.shape[0], x.stride()
        patches = x.as_strided(
            (n, height, width, c, r, s),
            (of_n, of_h * down, of_w * right, of_c, of_h * rows_apart, of_w * apart),
        )
        if not self._suits(input, patches):
            return None
        flat = self._product(patches.reshape(-1, c * r * s), weight.reshape(o, -1), bias)
        y = flat.to(input.dtype).view(n, height, width, o).permute(0, 3, 1, 2)
        return y.contiguous() if input.is_contiguous() and weight.is_contiguous() else y

    def _multiplied(
        self, input: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor | None:
        """A linear layer."""
        suits = self._suits(input, input)
        return self._product(input, weight, bias).to(input.dtype) if suits else None

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = x.to(self._dtype) @ weight.to(self._dtype).t()
        return y if bias is None else y + bias.to(self._dtype)


def float32_products() -> Products:
    """For a reference of 16 bits on a GPU. The first convolution of a process loads cuDNN (70 ms on
    an H200, 2026-11-22), the first product of each dtype a part of cuBLAS (60 to 90 ms). A proof
    that takes all its products in float32 needs one part of cuBLAS: 0.25 s instead of 0.75 for
    se_resnet9_fixup.
    """
    return Products(torch.float32, lambda x, patches: patches.nbytes <= MOST_BYTES)


def small_images_at_once() -> Products:
    """For a reference in float64 on a CPU."""
    return Products(torch.float64, _is_small_and_double)


def _is_small_and_double(x: Tensor, patches: Tensor) -> bool:
    small = patches.dim() == 6 and patches.shape[1] * patches.shape[2] <= SMALL_PIXELS
    return small and x.dtype == torch.float64 and x.device.type == "cpu"


def _pair(value: Pair) -> tuple[int, int]:
    both = (value, value) if isinstance(value, int) else (value[0], value[-1])
    return both
