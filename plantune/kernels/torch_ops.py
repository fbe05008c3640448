"""How the framework runs each op: writing into given memory where it has a way to.

An entry takes a node and the values, and returns what to call at each launch. Outputs are read
when an entry is made, inputs when the call is made: they may be other tensors each time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from plantune.cuda.workspaces import kept_workspaces
from plantune.graph.graph import Node
from plantune.graph.ops import op_named
from plantune.graph.ops.matmul import operands
from plantune.graph.ops.pointwise import along_axis

aten = torch.ops.aten
Values = dict[str, Tensor]
Call = Callable[[], object]
Maker = Callable[[Node, Values], Call]


def _binary(function: Callable[..., Tensor]) -> Maker:
    def make(node: Node, values: Values) -> Call:
        (a, b), y = node.inputs, values[node.name]
        return lambda: function(values[a], values[b], out=y)

    return make


def _channel(function: Callable[..., Tensor]) -> Maker:
    def make(node: Node, values: Values) -> Call:
        (a, b), y = node.inputs, values[node.name]
        rank, axis = y.dim(), node.attrs["axis"]
        return lambda: function(values[a], along_axis(values[b], rank, axis), out=y)

    return make


def _affine(node: Node, values: Values) -> Call:
    (a,), y = node.inputs, values[node.name]
    number = float if y.is_floating_point() else int
    alpha, beta = number(node.attrs["alpha"]), number(node.attrs["beta"])
    if alpha == 1:
        return lambda: torch.add(values[a], beta, out=y)
    if beta == 0:
        return lambda: torch.mul(values[a], alpha, out=y)

    def call() -> None:
        torch.mul(values[a], alpha, out=y)
        y.add_(beta)

    return call


def _cast(node: Node, values: Values) -> Call:
    (a,), y = node.inputs, values[node.name]
    return lambda: y.copy_(values[a])


def _relu(node: Node, values: Values) -> Call:
    (a,), y = node.inputs, values[node.name]
    return lambda: torch.clamp_min(values[a], 0, out=y)


def _relu_grad(node: Node, values: Values) -> Call:
    (a, b), y = node.inputs, values[node.name]
    return lambda: aten.threshold_backward(values[a], values[b], 0, grad_input=y)


def _sigmoid(node: Node, values: Values) -> Call:
    (a,), y = node.inputs, values[node.name]
    return lambda: torch.sigmoid(values[a], out=y)


def _sigmoid_grad(node: Node, values: Values) -> Call:
    (a, b), y = node.inputs, values[node.name]
    return lambda: aten.sigmoid_backward(values[a], values[b], grad_input=y)


def _rsqrt(node: Node, values: Values) -> Call:
    (a,), y, eps = node.inputs, values[node.name], node.attrs["eps"]

    def call() -> None:
        torch.add(values[a], eps, out=y)
        y.rsqrt_()

    return call


def _reduce(function: Callable[..., Tensor]) -> Maker:
    def make(node: Node, values: Values) -> Call:
        (a,), y = node.inputs, values[node.name]
        dims, keepdim = node.attrs["dims"], node.attrs["keepdim"]
        return lambda: function(values[a], dims, keepdim=keepdim, out=y)

    return make


def _sum_to(node: Node, values: Values) -> Call:
    (a,), y = node.inputs, values[node.name]

    def call() -> None:
        x = values[a]
        kept = (1,) * (x.dim() - y.dim()) + tuple(y.shape)
        dims = [axis for axis, size in enumerate(kept) if size != x.shape[axis]]
        if dims:
            torch.sum(x, dims, keepdim=True, out=y.view(kept))
        else:
            y.view(kept).copy_(x)

    return call


def _broadcast_to(node: Node, values: Values) -> Call:
    (a,), y = node.inputs, values[node.name]
    return lambda: y.copy_(values[a].expand(y.shape))


def _matmul(node: Node, values: Values) -> Call:
    (a, b), y, attrs = node.inputs, values[node.name], node.attrs

    def call() -> None:
        left, right = operands((values[a], values[b]), attrs)
        torch.mm(left, right, out=y)

    return kept_workspaces()(call) if y.is_cuda else call


def _avg_pool2d(node: Node, values: Values) -> Call:
    (a,), y, at = node.inputs, values[node.name], node.attrs
    window = (at["kernel"], at["stride"], at["padding"], False, at["count_padding"])
    return lambda: aten.avg_pool2d(values[a], *window, out=y)


def _avg_pool2d_grad(node: Node, values: Values) -> Call:
    (a,), dx, at = node.inputs, values[node.name], node.attrs
    window = (at["kernel"], at["stride"], at["padding"], False, at["count_padding"], None)
    # Only the shape of the pool's input is read.
    return lambda: aten.avg_pool2d_backward(values[a], dx, *window, grad_input=dx)


def _max_pool2d(node: Node, values: Values) -> Call:
    (a,), at = node.inputs, node.attrs
    y, places = (values[name] for name in node.outputs)
    window = (at["kernel"], at["stride"], at["padding"], (1, 1), False)
    return lambda: aten.max_pool2d_with_indices(values[a], *window, out=y, indices=places)


def _max_pool2d_grad(node: Node, values: Values) -> Call:
    (a, b), dx, at = node.inputs, values[node.name], node.attrs
    window = (at["kernel"], at["stride"], at["padding"], (1, 1), False)

    def call() -> None:
        aten.max_pool2d_with_indices_backward(values[a], dx, *window, values[b], grad_input=dx)

    return call


def _reshape(node: Node, values: Values) -> Call:
    (a,), y = node.inputs, values[node.name]

    def call() -> None:
        x = values[a]
        y.view(x.shape).copy_(x)

    return call


def _permute(node: Node, values: Values) -> Call:
    (a,), y, dims = node.inputs, values[node.name], node.attrs["dims"]
    return lambda: y.copy_(values[a].permute(dims))


def _space_to_depth(node: Node, values: Values) -> Call:
    (a,), y, b = node.inputs, values[node.name], node.attrs["block"]
    n, c, h, w = node.types[0].shape
    pixels = y.view(n, b, b, c // (b * b), h, w)

    def call() -> None:
        split = values[a].view(n, c // (b * b), h, b, w, b)
        pixels.copy_(split.permute(0, 3, 5, 1, 2, 4))

    return call


def _depth_to_space(node: Node, values: Values) -> Call:
    (a,), y, b = node.inputs, values[node.name], node.attrs["block"]
    n, c, h, w = node.types[0].shape
    pixels = y.view(n, c, h // b, b, w // b, b)

    def call() -> None:
        split = values[a].view(n, b, b, c, h // b, w // b)
        pixels.copy_(split.permute(0, 3, 4, 1, 5, 2))

    return call


def _batch_norm(node: Node, values: Values) -> Call:
    x, weight, bias, mean, var = node.inputs
    y, batch_mean, batch_invstd, new_mean, new_var = (values[name] for name in node.outputs)
    momentum, eps = node.attrs["momentum"], node.attrs["eps"]
    written = {"out": y, "save_mean": batch_mean, "save_invstd": batch_invstd}

    def call() -> None:
        new_mean.copy_(values[mean])
        new_var.copy_(values[var])
        affine = (values[weight], values[bias], new_mean, new_var)
        if y.is_cuda or batch_mean.dtype == values[weight].dtype:
            aten.native_batch_norm(values[x], *affine, True, momentum, eps, **written)
            return
        made = aten.native_batch_norm(values[x], *affine, True, momentum, eps)
        for value, result in zip(written.values(), made, strict=True):
            value.copy_(result)

    return call


def _evaluated(node: Node, values: Values) -> Call:
    """For ops that the framework cannot write elsewhere: the result replaces the value."""
    op = op_named(node.op)

    def call() -> None:
        results = op.evaluate([values[name] for name in node.inputs], node.attrs)
        values.update(zip(node.outputs, results, strict=True))

    return call


MAKERS: dict[str, Maker] = {
    "cast": _cast,
    "add": _binary(torch.add),
    "sub": _binary(torch.sub),
    "mul": _binary(torch.mul),
    "div": _binary(torch.div),
    "add_channel": _channel(torch.add),
    "mul_channel": _channel(torch.mul),
    "affine": _affine,
    "relu": _relu,
    "relu_grad": _relu_grad,
    "sigmoid": _sigmoid,
    "sigmoid_grad": _sigmoid_grad,
    "rsqrt": _rsqrt,
    "sum": _reduce(torch.sum),
    "mean": _reduce(torch.mean),
    "sum_to": _sum_to,
    "broadcast_to": _broadcast_to,
    "matmul": _matmul,
    "avg_pool2d": _avg_pool2d,
    "avg_pool2d_grad": _avg_pool2d_grad,
    "max_pool2d": _max_pool2d,
    "max_pool2d_grad": _max_pool2d_grad,
    "reshape": _reshape,
    "permute": _permute,
    "space_to_depth": _space_to_depth,
    "depth_to_space": _depth_to_space,
    "batch_norm": _batch_norm,
}


def maker_of(op: str) -> Maker:
    return MAKERS.get(op, _evaluated)


def writes(op: str) -> bool:
    """Whether the framework can write the op's result into given memory."""
    return op in MAKERS
