"""Convolutions and linear layers of references as products of matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import fold, linear, pad
from torch.overrides import TorchFunctionMode

# Limit for the copies of a convolution's input: larger ones are left to the framework.
MOST_BYTES = 1 << 30
# Limits for what is copied at once, and for rows whose products are added in one sum.
CHUNK_BYTES, MOST_ROWS = 1 << 28, 1 << 15
# Up to so many pixels torch's way in float64 on a CPU, image by image, takes longer: six times on
# 2x2 images of 512 channels.
SMALL_PIXELS = 16
Pair = int | tuple[int, ...]
# Another way to compute a function of torch's, None for what it is not for.
Way = Callable[..., Any]


class _OtherWays(TorchFunctionMode):
    """Inside, functions are computed in other ways where these are for the arguments."""

    def _way(self, func: Any) -> Way | None:
        raise NotImplementedError

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        way = self._way(func)
        found = way(*args, **(kwargs or {})) if way is not None else None
        return func(*args, **(kwargs or {})) if found is None else found


class Products(_OtherWays):
    """Inside, products of inputs for which `suits` is true of their patches are taken in `dtype`,
    and rounded once, to the dtype of the input.
    """

    def __init__(self, dtype: torch.dtype, suits: Callable[[Tensor, Tensor], bool]) -> None:
        super().__init__()
        self._dtype, self._suits = dtype, suits

    def _way(self, func: Any) -> Way | None:
        return {torch.conv2d: self._convolved, linear: self._multiplied}.get(func)

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
        patches = _patches(input.to(self._dtype), weight, stride, padding, dilation)
        if not self._suits(input, patches):
            return None
        flat = self._product(_rows(patches), weight.flatten(1), bias)
        y = flat.to(input.dtype).view(*patches.shape[:3], -1).permute(0, 3, 1, 2)
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


class SomeImagesAtOnce(_OtherWays):
    """Inside, convolutions and their gradients are products of matrices in the dtype of the input,
    of some images at once. Without cuDNN torch takes one image after the other: 8,192 of them take
    as many launches.
    """

    def _way(self, func: Any) -> Way | None:
        backward = torch.ops.aten.convolution_backward
        known: dict[Any, Way] = {torch.conv2d: _conv2d}
        known |= dict.fromkeys((backward, backward.default), _gradients)
        return known.get(func)


def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> Tensor | None:
    """The convolution, None if it is of another kind."""
    if x.dim() != 4 or groups != 1 or isinstance(padding, str) or bias is not None or not x.numel():
        return None
    found = []
    for images in x.split(_at_once(_patches(x[:1], weight, stride, padding, dilation))):
        patches = _patches(images, weight, stride, padding, dilation)
        y = _rows(patches) @ weight.flatten(1).t()
        found.append(y.view(*patches.shape[:3], -1).permute(0, 3, 1, 2).contiguous())
    return torch.cat(found)


def _gradients(*given: Any) -> tuple[Tensor | None, Tensor | None, None] | None:
    """The operands of a convolution's image and weight, None if it is of another kind."""
    dy, x, weight, _, *sizes, transposed, _, groups, mask = given
    if x.dim() != 4 or groups != 1 or transposed or mask[2] or not dy.numel():
        return None
    return (
        _image_gradient(dy, x, weight, *sizes) if mask[0] else None,
        _weight_gradient(dy, x, weight, *sizes) if mask[1] else None,
        None,
    )


def _image_gradient(
    dy: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    found = []
    for part in dy.split(_at_once(_patches(x[:1], weight, stride, padding, dilation))):
        columns = (_pixels(part) @ weight.flatten(1)).view(len(part), -1, weight[0].numel())
        kernel, image = tuple(weight.shape[2:]), tuple(x.shape[2:])
        found.append(fold(columns.mT, image, kernel, dilation, padding, stride))
    return torch.cat(found)


def _weight_gradient(
    dy: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """Sums of few rows are added in float64: one over millions would lose digits."""
    one = _patches(x[:1], weight, stride, padding, dilation)
    count = max(min(_at_once(one), MOST_ROWS // one[..., 0, 0, 0].numel()), 1)
    total = torch.zeros(len(weight), weight[0].numel(), dtype=torch.float64, device=dy.device)
    for part, images in zip(dy.split(count), x.split(count), strict=True):
        patches = _patches(images, weight, stride, padding, dilation)
        total += _pixels(part).t() @ _rows(patches)
    return total.to(dy.dtype).view(weight.shape)


def _patches(x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """What each pixel of a convolution reads: (N, P, Q, C, R, S), without a copy of a pixel."""
    (down, right), (top, left), (rows_apart, apart) = map(_pair, (stride, padding, dilation))
    x = pad(x, (left, left, top, top))
    c, r, s = weight.shape[1:]
    height = (x.shape[2] - rows_apart * (r - 1) - 1) // down + 1
    width = (x.shape[3] - apart * (s - 1) - 1) // right + 1
    of_n, of_c, of_h, of_w = x.stride()
    return x.as_strided(
        (len(x), height, width, c, r, s),
        (of_n, of_h * down, of_w * right, of_c, of_h * rows_apart, of_w * apart),
    )


def _rows(patches: Tensor) -> Tensor:
    return patches.reshape(-1, patches[0, 0, 0].numel())


def _pixels(y: Tensor) -> Tensor:
    """A row of channels for each pixel."""
    return y.permute(0, 2, 3, 1).reshape(-1, y.shape[1])


def _at_once(patches: Tensor) -> int:
    """How many images have room for their patches."""
    return max(CHUNK_BYTES // max(patches[0].nbytes, 1), 1)


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
