"""Average and max pooling of images, and their gradients."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from plantune.base.canonical import Attrs
from plantune.graph.ops.base import Domain, Gradient, Gradients, Op, Tensors, Types
from plantune.graph.types import TensorType

Shape = tuple[int, ...]


class PoolOp(Op):
    """What the four share: x is (N, C, H, W), y is (N, C, P, Q)."""

    arity = 1

    def output_shape(self, x: TensorType, attrs: Attrs) -> tuple[int, ...]:
        self.require(len(x.shape) == 4, f"needs rank 4, got {x.shape}")
        n, c, *image = x.shape
        self.require(
            min(attrs["kernel"]) > 0 and min(attrs["stride"]) > 0 and min(attrs["padding"]) >= 0,
            f"kernel and stride start at 1, padding at 0, got {attrs}",
        )
        half = all(2 * p <= k for p, k in zip(attrs["padding"], attrs["kernel"], strict=True))
        self.require(half, f"padding {attrs['padding']} is over half of kernel {attrs['kernel']}")
        sizes = [
            (size + 2 * pad - k) // stride + 1
            for size, k, stride, pad in zip(
                image, attrs["kernel"], attrs["stride"], attrs["padding"], strict=True
            )
        ]
        self.require(min(sizes) > 0, f"image {tuple(image)} is smaller than {attrs['kernel']}")
        return (n, c, *sizes)

    def gradient_type(self, dy: TensorType, attrs: Attrs) -> TensorType:
        x = TensorType(attrs["shape"], dy.dtype)
        y = self.output_shape(x, attrs)
        self.require(y == dy.shape, f"dy has shape {dy.shape}, needs {y}")
        return x

    def flops(self, inputs: Types, outputs: Types, attrs: Attrs) -> int:
        smaller = min(inputs[0].numel, outputs[0].numel)
        return int(smaller * math.prod(attrs["kernel"]))


def window(attrs: Attrs) -> dict[str, Any]:
    """The attributes that a pool shares with its gradient."""
    return {key: value for key, value in attrs.items() if key != "shape"}


class AvgPool2d(PoolOp):
    """The mean of each window; `count_padding` says whether padding counts as zeros."""

    name = "avg_pool2d"

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        return (TensorType(self.output_shape(inputs[0], attrs), inputs[0].dtype),)

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        return (
            torch.nn.functional.avg_pool2d(
                inputs[0],
                attrs["kernel"],
                attrs["stride"],
                attrs["padding"],
                count_include_pad=attrs["count_padding"],
            ),
        )

    def gradient(self, grad: Gradient) -> Gradients:
        shape = grad.type_of(grad.inputs[0]).shape
        return (grad.emit("avg_pool2d_grad", grad.dy, shape=shape, **window(grad.attrs)),)


class AvgPool2dGrad(PoolOp):
    name = "avg_pool2d_grad"

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        return (self.gradient_type(inputs[0], attrs),)

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        (dy,) = inputs
        x = dy.new_empty(1).expand(attrs["shape"])
        dx = torch.ops.aten.avg_pool2d_backward(
            dy,
            x,
            attrs["kernel"],
            attrs["stride"],
            attrs["padding"],
            False,
            attrs["count_padding"],
            None,
        )
        return (dx,)


class MaxPool2d(PoolOp):
    """The largest of each window, and its place in the image (row * W + column)."""

    name = "max_pool2d"

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        shape = self.output_shape(inputs[0], attrs)
        return (TensorType(shape, inputs[0].dtype), TensorType(shape, "int64"))

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        y, places = torch.ops.aten.max_pool2d_with_indices(
            inputs[0], attrs["kernel"], attrs["stride"], attrs["padding"]
        )
        return (y, places)

    def gradient(self, grad: Gradient) -> Gradients:
        shape = grad.type_of(grad.inputs[0]).shape
        places = grad.outputs[1]
        return (grad.emit("max_pool2d_grad", grad.dy, places, shape=shape, **window(grad.attrs)),)


class MaxPool2dGrad(PoolOp):
    """Each window's gradient goes to the place that won."""

    name = "max_pool2d_grad"
    arity = 2
    index: ClassVar[tuple[str, str]] = ("int64", "places")  # of what says which place won

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        (dy, won), (dtype, what) = inputs, self.index
        fits = won.dtype == dtype and won.shape == dy.shape
        self.require(fits, f"needs {dtype} {what} of shape {dy.shape}, got {won}")
        return (self.gradient_type(dy, attrs),)

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        dy, places = inputs
        n, c, h, w = attrs["shape"]
        dx = dy.new_zeros(n, c, h * w)
        dx.scatter_add_(2, places.reshape(n, c, -1), dy.reshape(n, c, -1))
        return (dx.view(n, c, h, w),)

    def domain(self, position: int, inputs: Types, attrs: Attrs) -> Domain:
        if position == 0:
            return Domain()
        draw = partial(_places_in_windows, inputs[1].shape, attrs)
        return Domain("index", attrs["shape"][2] * attrs["shape"][3], draw)


def _places_in_windows(shape: Shape, attrs: Attrs, random: torch.Generator) -> Tensor:
    """A pixel of each window: torch's kernels on a GPU look for a gradient nowhere else."""
    found = torch.zeros(shape, dtype=torch.int64, device=random.device)
    for axis, size in zip((2, 3), attrs["shape"][2:], strict=True):
        k, stride, pad = (attrs[name][axis - 2] for name in ("kernel", "stride", "padding"))
        along = [-1 if dim == axis else 1 for dim in range(4)]
        start = (torch.arange(shape[axis], device=random.device) * stride - pad).view(along)
        first, end = start.clamp(min=0), (start + k).clamp(max=size)
        part = torch.rand(shape, generator=random, dtype=torch.float64, device=random.device)
        found = found * size + first + (part * (end - first)).long()
    return found


MOST_TAPS = 256  # that a byte can number


class MaxPool2dTaps(PoolOp):
    """The largest of each window, and its tap: row * kernel width + column within the window."""

    name = "max_pool2d_taps"

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        taps = math.prod(attrs["kernel"])
        self.require(taps <= MOST_TAPS, f"a byte numbers {MOST_TAPS} taps, got {taps}")
        shape = self.output_shape(inputs[0], attrs)
        return (TensorType(shape, inputs[0].dtype), TensorType(shape, "uint8"))

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        y, places = torch.ops.aten.max_pool2d_with_indices(
            inputs[0], attrs["kernel"], attrs["stride"], attrs["padding"]
        )
        return (y, taps_of(places, inputs[0].shape[3], attrs))


class MaxPool2dTapsGrad(MaxPool2dGrad):
    """Each window's gradient goes to the tap that won."""

    name = "max_pool2d_taps_grad"
    index = ("uint8", "taps")

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        dy, taps = inputs
        width, columns, wide = attrs["shape"][3], attrs["kernel"][1], taps.long()
        first = _first_places(dy.shape, width, attrs, dy.device)
        return super().evaluate((dy, first + wide // columns * width + wide % columns), attrs)

    def domain(self, position: int, inputs: Types, attrs: Attrs) -> Domain:
        if position == 0:
            return Domain()

        def draw(random: torch.Generator) -> Tensor:
            places = _places_in_windows(inputs[1].shape, attrs, random)
            return taps_of(places, attrs["shape"][3], attrs)

        return Domain("index", math.prod(attrs["kernel"]), draw)


def taps_of(places: Tensor, width: int, attrs: Attrs) -> Tensor:
    """Places in images of that width as taps of their windows."""
    first = _first_places(places.shape, width, attrs, places.device)
    # From the window's first place, which may be outside of the image, on.
    apart, (_, padding) = places - first, attrs["padding"]
    start = torch.arange(places.shape[3], device=places.device) * attrs["stride"][1] - padding
    column = places % width - start
    row = (apart - column) // width
    taps: Tensor = row * attrs["kernel"][1] + column
    return taps.to(torch.uint8)


def _first_places(shape: Shape, width: int, attrs: Attrs, device: torch.device) -> Tensor:
    """Where each window begins, as a place of images that go on to all sides."""
    rows, columns = (
        torch.arange(size, device=device) * stride - padding
        for size, stride, padding in zip(shape[2:], attrs["stride"], attrs["padding"], strict=True)
    )
    first: Tensor = rows[:, None] * width + columns
    return first


OPS: tuple[Op, ...] = (
    *(AvgPool2d(), AvgPool2dGrad(), MaxPool2d(), MaxPool2dGrad()),
    *(MaxPool2dTaps(), MaxPool2dTapsGrad()),
)
