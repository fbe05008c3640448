"""Batch norm in training. In inference it is folded into scales and biases at extraction."""

from __future__ import annotations

import torch

from plantune.base.canonical import Attrs
from plantune.graph.ops.base import Gradient, Gradients, Op, Tensors, Types
from plantune.graph.types import DTYPES, TensorType, dtype_name


def _statistics(images: torch.dtype, weight: str) -> str:
    """The dtype of the batch's statistics: float32 of 16-bit images, as torch has them on a GPU. On
    the CPU it has them in the weight's.
    """
    return "float32" if images.itemsize == 2 else weight


class BatchNorm(Op):
    """Inputs x, weight, bias, running mean and variance.

    Outputs y, the batch's mean and 1 / sqrt(var + eps), and the two running statistics moved by
    `momentum` towards the batch's (the variance unbiased).
    """

    name = "batch_norm"
    arity = 5
    positive = (4,)
    flops_per_input = 8

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        x, *channels = inputs
        self.require(len(x.shape) >= 2, f"needs rank 2 or more, got {x.shape}")
        wanted = (x.shape[1],)
        fits = all(t.shape == wanted for t in channels)
        self.require(fits, f"per-channel inputs need shape {wanted}")
        count = x.numel // max(x.shape[1], 1)
        self.require(count > 1, f"a batch statistic needs more than one value, got {x.shape}")
        weight, _, mean, var = channels
        statistic = TensorType(wanted, _statistics(x.torch_dtype, weight.dtype))
        return (TensorType(x.shape, x.dtype), statistic, statistic, mean, var)

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        x, weight, bias, running_mean, running_var = inputs
        mean, var = running_mean.clone(), running_var.clone()
        y, *batch = torch.native_batch_norm(
            x, weight, bias, mean, var, True, attrs["momentum"], attrs["eps"]
        )
        dtype = DTYPES[_statistics(x.dtype, dtype_name(weight.dtype))]
        return (y, *(statistic.to(dtype) for statistic in batch), mean, var)

    def gradient(self, grad: Gradient) -> Gradients:
        x, weight = grad.inputs[:2]
        _, mean, invstd, _, _ = grad.outputs
        dx, dweight, dbias = grad.emit_all("batch_norm_grad", grad.dy, x, weight, mean, invstd)
        return (dx, dweight, dbias, None, None)


class BatchNormGrad(Op):
    """Inputs dy, x, weight and the batch's mean and invstd; gradients of x, weight and bias."""

    name = "batch_norm_grad"
    arity = 5
    positive = (4,)
    flops_per_input = 10

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        dy, x, weight, mean, invstd = inputs
        self.require(len(x.shape) >= 2, f"needs rank 2 or more, got {x.shape}")
        self.require(dy.shape == x.shape, f"dy has shape {dy.shape}, needs {x.shape}")
        channels = (x.shape[1],)
        fits = all(t.shape == channels for t in (weight, mean, invstd))
        self.require(fits, f"per-channel inputs need shape {channels}")
        return (TensorType(x.shape, x.dtype), weight, weight)

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        dy, x, weight, *statistics = inputs
        batch = statistics if x.is_cuda else [s.to(weight.dtype) for s in statistics]
        return tuple(
            torch.ops.aten.native_batch_norm_backward(
                dy, x, weight, None, None, *batch, True, 0.0, (True, True, True)
            )
        )


class BatchNormAgain(Op):
    """Inputs x, weight, bias and the batch's mean and invstd: the result of that batch norm."""

    name = "batch_norm_again"
    arity = 5
    flops_per_input = 4

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        x, *channels = inputs
        self.require(len(x.shape) >= 2, f"needs rank 2 or more, got {x.shape}")
        fits = all(t.shape == (x.shape[1],) for t in channels)
        self.require(fits, f"per-channel inputs need shape {(x.shape[1],)}")
        return (TensorType(x.shape, x.dtype),)

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        x, weight, bias, mean, invstd = inputs
        wide = torch.promote_types(x.dtype, torch.float32)
        column = (slice(None), *[None] * (x.dim() - 2))
        weight, bias, mean, invstd = (t.to(wide)[column] for t in (weight, bias, mean, invstd))
        return (((x.to(wide) - mean) * (invstd * weight) + bias).to(x.dtype),)


OPS: tuple[Op, ...] = (BatchNorm(), BatchNormGrad(), BatchNormAgain())
