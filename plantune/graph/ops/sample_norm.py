"""Layer norm and group norm: the statistics are of each sample, the same in training.

Inputs are x, a weight and a bias, as far as the network has them. Outputs are y, and the mean and
1 / sqrt(var + eps) of what is normalised together, as torch's kernels for a GPU keep them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from plantune.base.canonical import Attrs
from plantune.graph.ops.base import Gradient, Gradients, Op, Tensors, Types
from plantune.graph.types import TensorType

Shape = tuple[int, ...]
Affine = tuple[Tensor | None, Tensor | None]


class SampleNorm(Op):
    arity = None
    flops_per_input = 8

    @abstractmethod
    def why_not(self, x: TensorType, attrs: Attrs) -> str | None:
        """Why an input of this type cannot be normalised like that, or None if it can."""

    @abstractmethod
    def affine(self, x: TensorType, attrs: Attrs) -> TensorType:
        """The type of weight and bias."""

    @abstractmethod
    def statistics(self, x: TensorType, attrs: Attrs) -> TensorType:
        """The type of mean and rstd."""

    @abstractmethod
    def run(self, x: Tensor, affine: Affine, attrs: Attrs) -> tuple[Tensor, ...]:
        """What torch's kernel returns; `affine` are weight and bias."""

    @abstractmethod
    def run_backward(
        self, dy: Tensor, x: Tensor, statistics: Tensors, weight: Tensor | None, attrs: Attrs
    ) -> Sequence[Tensor]:
        """What torch's kernel returns: the gradients of x, weight and bias."""

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        self.require(1 <= len(inputs) <= 3, f"takes 1 to 3 inputs, got {len(inputs)}")
        x, *affine = inputs
        reason = self.why_not(x, attrs)
        self.require(reason is None, str(reason))
        wanted = self.affine(x, attrs)
        self.require(all(t == wanted for t in affine), f"weight and bias need {wanted}")
        statistics = self.statistics(x, attrs)
        return (TensorType(x.shape, x.dtype), statistics, statistics)

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        weight, bias = (inputs[at] if at < len(inputs) else None for at in (1, 2))
        return self.run(inputs[0], (weight, bias), attrs)

    def gradient(self, grad: Gradient) -> Gradients:
        x, *affine = grad.inputs
        inputs = (grad.dy, x, *grad.outputs[1:], *affine[:1])
        return grad.emit_all(f"{self.name}_grad", *inputs, affine=len(affine), **grad.attrs)


class LayerNorm(SampleNorm):
    """Over the last `axes` axes, whose shape weight and bias have."""

    name = "layer_norm"

    def why_not(self, x: TensorType, attrs: Attrs) -> str | None:
        fits = 0 < attrs["axes"] <= len(x.shape)
        return None if fits else f"{x.shape} has no {attrs['axes']} last axes"

    def affine(self, x: TensorType, attrs: Attrs) -> TensorType:
        return TensorType(x.shape[-attrs["axes"] :], x.dtype)

    def statistics(self, x: TensorType, attrs: Attrs) -> TensorType:
        dtype = "float32" if x.torch_dtype.itemsize == 2 else x.dtype
        return TensorType((*x.shape[: -attrs["axes"]], *(1,) * attrs["axes"]), dtype)

    def run(self, x: Tensor, affine: Affine, attrs: Attrs) -> tuple[Tensor, ...]:
        y, *statistics = torch.native_layer_norm(
            x, x.shape[-attrs["axes"] :], *affine, attrs["eps"]
        )
        # On the CPU torch keeps those of 16-bit numbers in 16 bits.
        return (y, *(s.float() if s.itemsize == 2 else s for s in statistics))

    def run_backward(
        self, dy: Tensor, x: Tensor, statistics: Tensors, weight: Tensor | None, attrs: Attrs
    ) -> Sequence[Tensor]:
        shape, mask = x.shape[-attrs["axes"] :], _mask(attrs)
        # Of the bias torch reads the type alone.
        affine = (weight, weight if mask[2] else None)
        kept = statistics if x.is_cuda else [s.to(x.dtype) for s in statistics]
        return tuple(torch.ops.aten.native_layer_norm_backward(dy, x, shape, *kept, *affine, mask))


class GroupNorm(SampleNorm):
    """Over all pixels of each of `groups` neighbouring parts of the channels."""

    name = "group_norm"

    def why_not(self, x: TensorType, attrs: Attrs) -> str | None:
        groups = attrs["groups"]
        fits = len(x.shape) >= 2 and groups > 0 and x.shape[1] % groups == 0
        return None if fits else f"the channels of {x.shape} do not divide into {groups} groups"

    def affine(self, x: TensorType, attrs: Attrs) -> TensorType:
        return TensorType(x.shape[1:2], x.dtype)

    def statistics(self, x: TensorType, attrs: Attrs) -> TensorType:
        return TensorType((x.shape[0], attrs["groups"]), x.dtype)

    def run(self, x: Tensor, affine: Affine, attrs: Attrs) -> tuple[Tensor, ...]:
        sizes = _sizes(x, attrs)
        format_ = _format_of(x)
        images = x.contiguous(memory_format=format_)
        return torch.native_group_norm(images, *affine, *sizes, attrs["eps"])

    def run_backward(
        self, dy: Tensor, x: Tensor, statistics: Tensors, weight: Tensor | None, attrs: Attrs
    ) -> Sequence[Tensor]:
        images, sizes = _alike(dy, x), _sizes(x, attrs)
        return tuple(
            torch.ops.aten.native_group_norm_backward(
                *images, *statistics, weight, *sizes, _mask(attrs)
            )
        )


class SampleNormGrad(Op):
    """Inputs dy, x, the statistics, and the weight if there is one; the gradients of x, and of the
    first `affine` of weight and bias.
    """

    arity = None
    positive = (3,)
    flops_per_input = 10

    def __init__(self, forward: SampleNorm) -> None:
        self.forward, self.name = forward, f"{forward.name}_grad"

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        count = attrs["affine"]
        self.require(len(inputs) == 4 + min(count, 1), f"cannot take {len(inputs)} inputs")
        dy, x, *statistics = inputs[:4]
        self.require(dy.shape == x.shape, f"dy has shape {dy.shape}, needs {x.shape}")
        reason = self.forward.why_not(x, attrs)
        self.require(reason is None, str(reason))
        wanted, affine = self.forward.statistics(x, attrs), self.forward.affine(x, attrs)
        self.require(all(t == wanted for t in statistics), f"statistics need {wanted}")
        self.require(all(t == affine for t in inputs[4:]), f"the weight needs {affine}")
        return (TensorType(x.shape, x.dtype), *(affine,) * count)

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        dy, x, mean, rstd, *rest = inputs
        weight = rest[0] if rest else None
        made = self.forward.run_backward(dy, x, (mean, rstd), weight, attrs)
        return tuple(made[: 1 + attrs["affine"]])


def _mask(attrs: Attrs) -> list[bool]:
    return [True, attrs["affine"] > 0, attrs["affine"] > 1]


def _alike(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Both in one order: torch's backward kernel reads dy in the order of x, whatever its strides
    are, so without this gradients are wrong on a CPU (torch 2.13).
    """
    format_ = _format_of(x)
    return dy.contiguous(memory_format=format_), x.contiguous(memory_format=format_)


def _format_of(x: Tensor) -> torch.memory_format:
    """That in which torch's kernels read images; those for a GPU read row-major ones alone."""
    known = () if x.is_cuda else (torch.channels_last, torch.channels_last_3d)
    found = (format_ for format_ in known if x.is_contiguous(memory_format=format_))
    return next(found, torch.contiguous_format)


def _sizes(x: Tensor, attrs: Attrs) -> tuple[int, int, int, int]:
    """Images, channels, pixels of each, and groups."""
    return x.shape[0], x.shape[1], math.prod(x.shape[2:]), attrs["groups"]


FORWARD: tuple[SampleNorm, ...] = (LayerNorm(), GroupNorm())
OPS: tuple[Op, ...] = (*FORWARD, *map(SampleNormGrad, FORWARD))
