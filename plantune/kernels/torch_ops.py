"""How the framework runs each op: writing into given memory if it can.

An entry takes a node and the memory of its outputs, and returns what to call at each launch with
the inputs: they may be other tensors each time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from plantune.base.op_mode import OpMode
from plantune.devices.cuda.workspaces import kept_workspaces
from plantune.devices.device import Runnable
from plantune.graph import Attrs, Node, TensorType
from plantune.graph.ops import op_named
from plantune.graph.ops.functions import FunctionOp
from plantune.graph.ops.matmul import operands
from plantune.graph.ops.overload import OverloadOp
from plantune.graph.ops.pointwise import along_axis
from plantune.kernels.family import Values

# What some of cuDNN's kernels read at once.
WORD_BYTES = 16

RECURRENT = ("aten.lstm.", "aten.gru.", "aten.rnn_")


class DropoutStates(OpMode):
    """Keeps those that are read inside.

    torch has one for each GPU, and makes another one after its generator was seeded or set; a graph
    that was captured before still counts in the old one.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._cudnn_rnn.default and isinstance(args[-1], Tensor):
            self._kept.append(args[-1])
        if func is not torch.ops.aten._cudnn_rnn.default:
            with self:  # in inference mode a layer comes here as a whole
                made = func.decompose(*args, **(kwargs or {}))
            if made is not NotImplemented:
                return made
        return func(*args, **(kwargs or {}))


def keeping(op: str, call: Callable[[], None]) -> Callable[[], None]:
    """The call of an op, which keeps what a graph that it is captured in counts in."""
    if not op.startswith(RECURRENT):
        return call
    states = DropoutStates()

    def keep() -> None:
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return _without_advice(call)
        with states:
            return _without_advice(call)

    return keep


class _Inside(torch.autograd.Function):
    """A call that torch hands its warnings to, which otherwise come when the whole pass ends."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None]) -> None:
        call()


def _without_advice(call: Callable[[], None]) -> None:
    """Autocast's weights are apart in memory, which the user cannot change as torch advises."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RNN module weights are not part", UserWarning)
        _Inside.apply(call)  # type: ignore[no-untyped-call]


aten = torch.ops.aten
# The results of these are, or may be, views in torch.
VIEWS = ("broadcast_to", "permute", "reshape")
Run = Callable[..., object]
Writer = Callable[..., Run]


def _out(function: Run) -> Writer:
    return lambda node, y: partial(function, out=y)


def _channel(function: Run) -> Writer:
    def write(node: Node, y: Tensor) -> Run:
        rank, axis = y.dim(), node.attrs["axis"]
        return lambda a, b: function(a, along_axis(b, rank, axis), out=y)

    return write


def _affine(node: Node, y: Tensor) -> Run:
    number = float if y.is_floating_point() else int
    alpha, beta = number(node.attrs["alpha"]), number(node.attrs["beta"])
    if alpha == 1:
        return lambda x: torch.add(x, beta, out=y)
    if beta == 0:
        return lambda x: torch.mul(x, alpha, out=y)
    return lambda x: torch.mul(x, alpha, out=y).add_(beta)


def _rsqrt(node: Node, y: Tensor) -> Run:
    return lambda x: torch.add(x, node.attrs["eps"], out=y).rsqrt_()


def _reduce(function: Run) -> Writer:
    def write(node: Node, y: Tensor) -> Run:
        return partial(function, dim=node.attrs["dims"], keepdim=node.attrs["keepdim"], out=y)

    return write


def _sum_to(node: Node, y: Tensor) -> Run:
    def run(x: Tensor) -> None:
        kept = (1,) * (x.dim() - y.dim()) + tuple(y.shape)
        dims = [axis for axis, size in enumerate(kept) if size != x.shape[axis]]
        if dims:
            torch.sum(x, dims, keepdim=True, out=y.view(kept))
        else:
            y.view(kept).copy_(x)

    return run


def _matmul(node: Node, y: Tensor) -> Run:
    def run(*factors: Tensor) -> None:
        torch.mm(*operands(factors, node.attrs), out=y)

    return kept_workspaces()(run) if y.is_cuda else run


def _average(at: Attrs) -> tuple[Any, ...]:
    return at["kernel"], at["stride"], at["padding"], False, at["count_padding"]


def _most(at: Attrs) -> tuple[Any, ...]:
    return at["kernel"], at["stride"], at["padding"], (1, 1), False


def _avg_pool2d(node: Node, y: Tensor) -> Run:
    return lambda x: aten.avg_pool2d(x, *_average(node.attrs), out=y)


def errs_in_channels_last(node: Node) -> bool:
    """Whether torch's kernel for channels_last on a GPU is wrong: it takes a pixel for the one that
    is as far before it as the padding is wide, and gradients are off by their own size (torch 2.11,
    H200, 2026-11-22).
    """
    return node.op == "avg_pool2d_grad" and any(node.attrs["padding"])


def may_misread_pixels(node: Node, types: Mapping[str, TensorType]) -> bool:
    """Whether a GPU may lose its context in channels_last: some of cuDNN's kernels read 16 bytes at
    once, whatever a pixel has. The gradient of a filter of 3 channels in float32 does, by
    compute-sanitizer; with a depthwise convolution of 4 channels in float16 the error is the same
    (torch 2.11, cuDNN 9.19, H200, 2026-11-28).
    """
    images = [types[name] for name in (*node.inputs, *node.outputs) if len(types[name].shape) == 4]
    pixels = (type_.shape[1] * type_.torch_dtype.itemsize for type_ in images)
    return node.op.startswith("conv2d") and any(size % WORD_BYTES for size in pixels)


def _avg_pool2d_grad(node: Node, dx: Tensor) -> Run:
    window, backward = (*_average(node.attrs), None), aten.avg_pool2d_backward
    if dx.is_cuda and errs_in_channels_last(node) and not dx.is_contiguous():
        rows = dx.new_empty(1).expand(dx.shape)
        return lambda dy: dx.copy_(backward(dy.contiguous(), rows, *window))
    # Only the shape of the pool's input is read.
    return lambda dy: backward(dy, dx, *window, grad_input=dx)


def _max_pool2d(node: Node, y: Tensor, places: Tensor) -> Run:
    window = _most(node.attrs)
    return lambda x: aten.max_pool2d_with_indices(x, *window, out=y, indices=places)


def _max_pool2d_grad(node: Node, dx: Tensor) -> Run:
    backward, window = aten.max_pool2d_with_indices_backward, _most(node.attrs)
    return lambda dy, places: backward(dy, dx, *window, places, grad_input=dx)


def _space_to_depth(node: Node, y: Tensor) -> Run:
    b, (n, c, h, w) = node.attrs["block"], node.types[0].shape
    pixels, split = y.view(n, b, b, c // (b * b), h, w), (n, c // (b * b), h, b, w, b)
    return lambda x: pixels.copy_(x.view(split).permute(0, 3, 5, 1, 2, 4))


def _depth_to_space(node: Node, y: Tensor) -> Run:
    b, (n, c, h, w) = node.attrs["block"], node.types[0].shape
    pixels, split = y.view(n, c, h // b, b, w // b, b), (n, b, b, c, h // b, w // b)
    return lambda x: pixels.copy_(x.view(split).permute(0, 3, 4, 1, 5, 2))


def _batch_norm(node: Node, y: Tensor, *others: Tensor) -> Run:
    batch_mean, batch_invstd, new_mean, new_var = others
    momentum, eps = node.attrs["momentum"], node.attrs["eps"]
    written = {"out": y, "save_mean": batch_mean, "save_invstd": batch_invstd}

    def run(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> None:
        new_mean.copy_(mean)
        new_var.copy_(var)
        affine = (weight, bias, new_mean, new_var)
        if y.is_cuda or batch_mean.dtype == weight.dtype:
            aten.native_batch_norm(x, *affine, True, momentum, eps, **written)
            return
        made = aten.native_batch_norm(x, *affine, True, momentum, eps)
        for value, result in zip(written.values(), made, strict=True):
            value.copy_(result)

    return run


def _identity(node: Node, *outputs: Tensor) -> Run:
    def run(*inputs: Tensor) -> None:
        for y, x in zip(outputs, inputs, strict=True):
            y.copy_(x)

    return run


WRITERS: dict[str, Writer] = {
    "cast": lambda node, y: y.copy_,
    "add": _out(torch.add),
    "sub": _out(torch.sub),
    "mul": _out(torch.mul),
    "div": _out(torch.div),
    "add_channel": _channel(torch.add),
    "mul_channel": _channel(torch.mul),
    "affine": _affine,
    "rsqrt": _rsqrt,
    "sum": _reduce(torch.sum),
    "mean": _reduce(torch.mean),
    "sum_to": _sum_to,
    "broadcast_to": lambda node, y: lambda x: y.copy_(x.expand(y.shape)),
    "matmul": _matmul,
    "avg_pool2d": _avg_pool2d,
    "avg_pool2d_grad": _avg_pool2d_grad,
    "max_pool2d": _max_pool2d,
    "max_pool2d_grad": _max_pool2d_grad,
    "reshape": lambda node, y: lambda x: y.view(x.shape).copy_(x),
    "permute": lambda node, y: lambda x: y.copy_(x.permute(node.attrs["dims"])),
    "space_to_depth": _space_to_depth,
    "depth_to_space": _depth_to_space,
    "batch_norm": _batch_norm,
    "identity": _identity,
}


def call_of(node: Node, values: Values, loose: Collection[str] = ()) -> Runnable:
    """What runs a node in each launch, on the inputs that are then among the values.

    Of ops that the framework cannot write elsewhere, the result replaces the value. Those in
    `loose` are as torch makes them.
    """
    inputs, outputs = node.inputs, node.outputs
    writer = _writer_of(node.op)
    places = [place for place, name in enumerate(outputs) if name in loose]
    if writer is not None and not places:
        run = writer(node, *(values[name] for name in outputs))
        return lambda: run(*map(values.__getitem__, inputs))
    op = op_named(node.op)
    evaluate = op.evaluate
    if isinstance(op, OverloadOp):
        evaluate = partial(op.evaluate_loosely, loose=places)

    def call() -> None:
        results = evaluate([values[name] for name in inputs], node.attrs)
        values.update(zip(outputs, results, strict=True))

    return keeping(node.op, call)


def viewed(node: Node) -> str | None:
    """The value of which all that a node makes may be views; None if there is none."""
    if node.op in VIEWS:
        return node.inputs[0]
    op = op_named(node.op)
    place = op.viewed(node.attrs) if isinstance(op, OverloadOp) else None
    return None if place is None else node.inputs[place]


def writes(op: str) -> bool:
    """Whether the framework can write the op's result into given memory."""
    return _writer_of(op) is not None


def _writer_of(name: str) -> Writer | None:
    op = op_named(name)
    if name in WRITERS or not isinstance(op, FunctionOp):
        return WRITERS.get(name)
    return lambda node, y: partial(op.torch, **{op.writes: y})
