"""Functions of one number: an entry of one table, from which everything else about them follows.

The op and its gradient (here), how torch spells and runs them (`spelling/arithmetic.py`,
`kernels/torch_ops.py`), where they may be fused (`activation` in fusions.toml), and the functors in
the epilogues of kernels (`kernels/patterns/expression.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from plantune.canonical import Attrs
from plantune.graph.ops.base import Gradient, Gradients, Op, PointwiseOp, Tensors

aten = torch.ops.aten


@dataclass(frozen=True)
class Derivative:
    """`torch` takes dy and the function's result; `cxx` makes the same of {0} and {1}.

    If it is `of_argument`, both take the argument instead of the result. `writes` names the
    parameter through which torch writes into given memory.
    """

    torch: Callable[..., Tensor]
    cxx: str
    of_argument: bool = False
    writes: str = "grad_input"


@dataclass(frozen=True)
class Function:
    """`torch` takes x, and `out` if given; `cxx` makes the same of {0}, a float.

    `spelled` are torch's overloads for it.
    """

    name: str
    torch: Callable[..., Tensor]
    cxx: str
    spelled: tuple[str, ...]
    derivative: Derivative | None = None


FUNCTIONS: dict[str, Function] = {
    function.name: function
    for function in (
        Function(
            *("relu", partial(torch.clamp_min, min=0), "plantune::relu({0})"),
            ("aten.relu.default",),
            Derivative(
                partial(aten.threshold_backward, threshold=0), "plantune::relu_grad({0}, {1})"
            ),
        ),
        Function(
            *("sigmoid", torch.sigmoid, "plantune::sigmoid({0})"),
            ("aten.sigmoid.default",),
            Derivative(aten.sigmoid_backward, "plantune::sigmoid_grad({0}, {1})"),
        ),
    )
}


class FunctionOp(PointwiseOp):
    """A function of each element, or its gradient: `torch`, which can write to `writes`."""

    def __init__(self, name: str, of: Function | Derivative) -> None:
        self.name, self.torch, self.cxx = name, of.torch, of.cxx
        self.arity, self.writes = (1, "out") if isinstance(of, Function) else (2, of.writes)

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        return (self.torch(*inputs),)


class Differentiable(FunctionOp):
    """A function with a derivative."""

    def __init__(self, function: Function, derivative: Derivative) -> None:
        super().__init__(function.name, function)
        self._of_argument = derivative.of_argument

    def gradient(self, grad: Gradient) -> Gradients:
        (read,) = grad.inputs if self._of_argument else grad.outputs
        return (grad.emit(f"{self.name}_grad", grad.dy, read),)


def ops_of(function: Function) -> tuple[Op, ...]:
    """The op of a function, and that of its derivative if it has one."""
    name, derivative = function.name, function.derivative
    if derivative is None:
        return (FunctionOp(name, function),)
    return Differentiable(function, derivative), FunctionOp(f"{name}_grad", derivative)


OPS: tuple[Op, ...] = tuple(op for function in FUNCTIONS.values() for op in ops_of(function))
