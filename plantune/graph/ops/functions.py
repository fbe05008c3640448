"""Functions of one number: an entry of one table, from which everything else about them follows.

The op and its gradient (here), how torch spells and runs them (`spelling/arithmetic.py`,
`kernels/torch_ops.py`), where they may be fused (`activation` in fusions.toml), and the functors in
the epilogues of kernels (`kernels/patterns/expression.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from plantune.base.canonical import Attrs
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

    `spelled` are torch's overloads for it: with these `arguments` after x, or without any.
    """

    name: str
    torch: Callable[..., Tensor]
    cxx: str
    spelled: tuple[str, ...]
    derivative: Derivative | None = None
    arguments: tuple[object, ...] = ()


def _of_argument(name: str) -> Derivative:
    """The derivative of torch's function `name`, of the argument, as `arithmetic.h` has it."""
    backward = getattr(aten, f"{name}_backward")
    return Derivative(backward, f"plantune::{name}_grad({{0}}, {{1}})", of_argument=True)


def _run_gelu(x: Tensor, out: Tensor | None = None, *, approximate: str) -> Tensor:
    """On a CPU torch 2.13 leaves given memory as it is if its strides are not those of x."""
    if out is not None and out.is_cuda:
        return aten.gelu.out(x, approximate=approximate, out=out)  # type: ignore[no-any-return]
    return _into(out, aten.gelu(x, approximate=approximate))


def _gelu(name: str, approximate: str) -> Function:
    backward = partial(aten.gelu_backward, approximate=approximate)
    return Function(
        *(name, partial(_run_gelu, approximate=approximate), f"plantune::{name}({{0}})"),
        ("aten.gelu.default",),
        Derivative(backward, f"plantune::{name}_grad({{0}}, {{1}})", of_argument=True),
        (approximate,),
    )


def _hardtanh(name: str, low: float, high: float, *more: str) -> Function:
    return Function(
        *(name, partial(aten.hardtanh, min_val=low, max_val=high)),
        f"({{0}} <= {low}f ? {low}f : {{0}} >= {high}f ? {high}f : {{0}})",
        ("aten.hardtanh.default", *more),
        Derivative(
            partial(aten.hardtanh_backward, min_val=low, max_val=high),
            f"({{1}} <= {low}f || {{1}} >= {high}f ? 0.0f : {{0}})",
        ),
        (low, high),
    )


def _leaky_relu(name: str, slope: float) -> Function:
    backward = partial(aten.leaky_relu_backward, negative_slope=slope, self_is_result=False)
    return Function(
        *(name, partial(aten.leaky_relu, negative_slope=slope)),
        f"({{0}} > 0.0f ? {{0}} : {{0}} * {slope}f)",
        ("aten.leaky_relu.default",),
        Derivative(backward, f"({{1}} > 0.0f ? {{0}} : {{0}} * {slope}f)", of_argument=True),
        (slope,),
    )


def _elu_backward(dy: Tensor, x: Tensor, grad_input: Tensor | None = None) -> Tensor:
    """torch's own loses NaN where it works by vectors (2.13, CPU)."""
    return _into(grad_input, torch.where(x > 0, dy, dy * x.exp()))


def _mish_backward(dy: Tensor, x: Tensor, grad_input: Tensor | None = None) -> Tensor:
    """torch has none that writes into given memory."""
    return _into(grad_input, aten.mish_backward(dy, x))


def _into(memory: Tensor | None, made: Tensor) -> Tensor:
    return made if memory is None else memory.copy_(made)


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
        Function(
            *("tanh", torch.tanh, "tanhf({0})", ("aten.tanh.default",)),
            Derivative(aten.tanh_backward, "{0} * (1.0f - {1} * {1})"),
        ),
        Function(
            *("silu", aten.silu, "plantune::silu({0})", ("aten.silu.default",)),
            _of_argument("silu"),
        ),
        _gelu("gelu", "none"),
        _gelu("gelu_tanh", "tanh"),
        _hardtanh("relu6", 0.0, 6.0, "aten.relu6.default"),
        _hardtanh("hardtanh", -1.0, 1.0),
        Function(
            *("hardswish", aten.hardswish, "plantune::hardswish({0})"),
            ("aten.hardswish.default",),
            replace(_of_argument("hardswish"), writes="out"),
        ),
        Function(
            *("hardsigmoid", aten.hardsigmoid, "plantune::hardsigmoid({0})"),
            ("aten.hardsigmoid.default",),
            _of_argument("hardsigmoid"),
        ),
        # A chain of an epilogue holds names alone, so each slope that networks have is an entry.
        _leaky_relu("leaky_relu", 0.01),
        _leaky_relu("leaky_relu_10", 0.1),
        _leaky_relu("leaky_relu_20", 0.2),
        Function(
            *("elu", aten.elu, "plantune::elu({0})", ("aten.elu.default",)),
            Derivative(_elu_backward, "plantune::elu_grad({0}, {1})", of_argument=True),
            (1, 1, 1),
        ),
        Function(
            *("mish", aten.mish, "plantune::mish({0})", ("aten.mish.default",)),
            Derivative(_mish_backward, "plantune::mish_grad({0}, {1})", of_argument=True),
        ),
        Function(
            *("softplus", aten.softplus, "plantune::softplus({0})", ("aten.softplus.default",)),
            Derivative(
                partial(aten.softplus_backward, beta=1, threshold=20),
                "plantune::softplus_grad({0}, {1})",
                of_argument=True,
            ),
            (1, 20),
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
