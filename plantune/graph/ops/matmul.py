"""The matrix product, of which linear layers and their gradients are made."""

from __future__ import annotations

from torch import Tensor

from plantune.base.canonical import Attrs
from plantune.graph.ops.base import Gradient, Gradients, Op, Tensors, Types
from plantune.graph.types import TensorType


class Matmul(Op):
    """a @ b of two matrices, each transposed first if its flag says so."""

    name = "matmul"
    arity = 2
    multiplies = True

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        a, b = inputs
        self.require(len(a.shape) == len(b.shape) == 2, f"needs matrices, got {a.shape}, {b.shape}")
        self.require(a.dtype == b.dtype, f"dtypes differ: {a.dtype} and {b.dtype}")
        m, k = reversed(a.shape) if attrs["transpose_a"] else a.shape
        k_of_b, n = reversed(b.shape) if attrs["transpose_b"] else b.shape
        self.require(k == k_of_b, f"inner sizes differ: {k} and {k_of_b}")
        return (TensorType((m, n), a.dtype),)

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        a, b = operands(inputs, attrs)
        return (a @ b,)

    def gradient(self, grad: Gradient) -> Gradients:
        dy = grad.dy
        a, b = grad.inputs
        ta, tb = grad.attrs["transpose_a"], grad.attrs["transpose_b"]

        def product(left: str, right: str, transpose_a: bool, transpose_b: bool) -> str:
            return grad.emit(
                "matmul", left, right, transpose_a=transpose_a, transpose_b=transpose_b
            )

        da = db = None
        if grad.needs(0):
            da = product(b, dy, tb, True) if ta else product(dy, b, False, not tb)
        if grad.needs(1):
            db = product(dy, a, True, ta) if tb else product(a, dy, not ta, False)
        return (da, db)

    def flops(self, inputs: Types, outputs: Types, attrs: Attrs) -> int:
        k = inputs[0].shape[0 if attrs["transpose_a"] else 1]
        return 2 * outputs[0].numel * k


def operands(inputs: Tensors, attrs: Attrs) -> tuple[Tensor, Tensor]:
    """The two matrices as the product takes them."""
    a, b = inputs
    return (a.t() if attrs["transpose_a"] else a, b.t() if attrs["transpose_b"] else b)


OPS: tuple[Op, ...] = (Matmul(),)
