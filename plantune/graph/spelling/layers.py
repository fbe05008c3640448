"""How torch spells layers with weights, windows or a training mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from plantune.graph.spelling.fills import filled
from plantune.graph.spelling.reader import NotRead, Reader, Value
from plantune.graph.spelling.shapes import reshape

Sizes = Sequence[int]


def _pair(value: Sizes) -> tuple[int, int]:
    """torch gives a size that is the same both ways once."""
    first, second = value if len(value) == 2 else (value[0], value[0])
    return (first, second)


def _image(g: Reader, x: Value) -> None:
    if len(g.shape(x)) != 4:
        raise NotRead("an image without a batch")


def _conv2d(
    g: Reader,
    x: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Sizes = (1,),
    padding: Sizes | str = (0,),
    dilation: Sizes = (1,),
    groups: int = 1,
) -> Value:
    _image(g, x)
    window = {"stride": _pair(stride), "dilation": _pair(dilation)}
    padding = _padding(g, weight, padding, window) if isinstance(padding, str) else _pair(padding)
    y = g.emit("conv2d", x, weight, padding=padding, groups=groups, **window)
    return y if bias is None else g.emit("add_channel", y, bias, axis=1)


def _padding(
    g: Reader, weight: Value, name: str, window: dict[str, tuple[int, int]]
) -> tuple[int, int]:
    """Padding "same" adds what is odd at one side alone, which the op cannot."""
    if name == "valid":
        return (0, 0)
    spans = [d * (k - 1) for d, k in zip(window["dilation"], g.shape(weight)[2:], strict=True)]
    if any(span % 2 for span in spans):
        raise NotRead("padding that differs at both sides")
    return (spans[0] // 2, spans[1] // 2)


def _convolution(
    g: Reader,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
) -> Value:
    if transposed:
        raise NotRead("a transposed convolution")
    return _conv2d(g, x, weight, bias, stride, padding, dilation, groups)


def linear(g: Reader, x: Value, weight: Value, bias: Value | None = None) -> Value:
    shape = g.shape(x)
    rows = x if len(shape) == 2 else reshape(g, x, (-1, shape[-1]))
    y = g.emit("matmul", rows, weight, transpose_a=False, transpose_b=True)
    if bias is not None:
        y = g.emit("add_channel", y, bias, axis=1)
    return y if len(shape) == 2 else reshape(g, y, (*shape[:-1], g.shape(weight)[0]))


def _mm(g: Reader, a: Value, b: Value) -> Value:
    return g.emit("matmul", a, b, transpose_a=False, transpose_b=False)


def _addmm(g: Reader, bias: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    if (alpha, beta) != (1, 1) or len(g.shape(bias)) != 1 or g.shape(bias) != g.shape(b)[1:]:
        raise NotRead("a scaled product")
    return g.emit("add_channel", _mm(g, a, b), bias, axis=1)


def _batch_norm(
    g: Reader,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value | None,
    var: Value | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Value:
    if mean is None or var is None:
        raise NotRead("a batch norm without running statistics")
    if not training:
        return _normalised(g, x, weight, bias, mean, var, eps)
    weight = weight or filled(g, g.shape(mean), 1, g.type_of(mean).torch_dtype)
    bias = bias or filled(g, g.shape(mean), 0, g.type_of(mean).torch_dtype)
    y, _, _, new_mean, new_var = g.emit_all(
        "batch_norm", x, weight, bias, mean, var, eps=eps, momentum=momentum
    )
    g.update(mean, new_mean)
    g.update(var, new_var)
    return y


def _normalised(
    g: Reader,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    var: Value,
    eps: float,
) -> Value:
    """One scale and one shift of each channel, which follow from weights alone."""
    scale = g.emit("rsqrt", var, eps=eps)
    scale = scale if weight is None else g.emit("mul", weight, scale)
    moved = g.emit("mul", mean, scale)
    shift = g.emit("affine", moved, alpha=-1.0, beta=0.0) if bias is None else None
    shift = g.emit("sub", bias, moved) if bias is not None else shift
    assert shift is not None
    return g.emit("add_channel", g.emit("mul_channel", x, scale, axis=1), shift, axis=1)


def _layer_norm(
    g: Reader,
    x: Value,
    normalized_shape: Sizes,
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Value:
    inputs = _norm_inputs(g, x, weight, bias)
    return g.emit_all("layer_norm", *inputs, axes=len(normalized_shape), eps=eps)[0]


def _group_norm(
    g: Reader,
    x: Value,
    num_groups: int,
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Value:
    return g.emit_all("group_norm", *_norm_inputs(g, x, weight, bias), groups=num_groups, eps=eps)[
        0
    ]


def _instance_norm(
    g: Reader,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value | None,
    var: Value | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Value:
    """In training; the statistics move by the mean of what each image's are."""
    if mean is None or var is None or not use_input_stats:
        raise NotRead("an instance norm that moves no statistics")
    if len({g.type_of(value).dtype for value in (x, mean, var)}) > 1:
        raise NotRead("statistics in another dtype")
    aten, pixels = torch.ops.aten, [*range(2, len(g.shape(x)))]
    rest = (None, None, True, momentum, eps, cudnn_enabled)
    y = g.torch_op(aten.instance_norm.default, x, weight, bias, *rest)
    each = g.torch_op(aten.var.correction, x, pixels, correction=1)
    _move(g, mean, g.torch_op(aten.mean.dim, x, [0, *pixels]), momentum)
    _move(g, var, g.torch_op(aten.mean.dim, each, [0]), momentum)
    return y


def _move(g: Reader, statistic: Value, now: Value, momentum: float) -> None:
    before = g.emit("affine", statistic, alpha=1.0 - momentum, beta=0.0)
    g.update(statistic, g.emit("add", before, g.emit("affine", now, alpha=momentum, beta=0.0)))


def _norm_inputs(g: Reader, x: Value, weight: Value | None, bias: Value | None) -> list[Value]:
    if weight is None and bias is not None:
        raise NotRead("a norm with a bias alone")
    inputs = [value for value in (x, weight, bias) if value is not None]
    dtypes = {g.type_of(value).dtype for value in inputs}
    if len(dtypes) > 1 or not g.type_of(x).is_float or not g.type_of(x).numel:
        raise NotRead("a norm of several dtypes, of integers or of nothing")
    return inputs


def _window(kernel: Sizes, stride: Sizes, padding: Sizes) -> dict[str, Any]:
    return {
        "kernel": _pair(kernel),
        "stride": _pair(stride or kernel),
        "padding": _pair(padding),
    }


def _avg_pool2d(
    g: Reader,
    x: Value,
    kernel_size: Sizes,
    stride: Sizes = (),
    padding: Sizes = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    _image(g, x)
    window = _window(kernel_size, stride, padding)
    if (ceil_mode and _rounds(g, x, window)) or divisor_override is not None:
        raise NotRead("an average pool with ceil_mode or divisor_override")
    return g.emit("avg_pool2d", x, **window, count_padding=count_include_pad)


def _max_pool2d(
    g: Reader,
    x: Value,
    kernel_size: Sizes,
    stride: Sizes = (),
    padding: Sizes = (0,),
    dilation: Sizes = (1,),
    ceil_mode: bool = False,
) -> Value:
    _image(g, x)
    window = _window(kernel_size, stride, padding)
    if (ceil_mode and _rounds(g, x, window)) or _pair(dilation) != (1, 1):
        raise NotRead("a max pool with ceil_mode or dilation")
    return g.emit("max_pool2d", x, **window)


def _rounds(g: Reader, x: Value, window: dict[str, Any]) -> bool:
    """Whether windows do not end where the image does, so that ceil_mode makes a difference."""
    sizes = zip(g.shape(x)[2:], *(window[k] for k in ("kernel", "stride", "padding")), strict=True)
    return any((size + 2 * pad - taps) % step for size, taps, step, pad in sizes)


def _adaptive_avg_pool2d(g: Reader, x: Value, output_size: Sizes) -> Value:
    _image(g, x)
    if _pair(output_size) != (1, 1) or not g.type_of(x).is_float:
        raise NotRead("adaptive average pooling to more than one pixel")
    return g.emit("mean", x, dims=(2, 3), keepdim=True)


def _dropout(g: Reader, x: Value, p: float, train: bool) -> Value:
    if train and p > 0:
        raise NotRead("dropout in training")
    return x


OVERLOADS: dict[str, Callable[..., Any]] = {
    "aten.conv2d.default": _conv2d,
    "aten.conv2d.padding": _conv2d,
    "aten.convolution.default": _convolution,
    "aten.linear.default": linear,
    "aten.mm.default": _mm,
    "aten.addmm.default": _addmm,
    "aten.batch_norm.default": _batch_norm,
    "aten.layer_norm.default": _layer_norm,
    "aten.group_norm.default": _group_norm,
    "aten.instance_norm.default": _instance_norm,
    "aten.avg_pool2d.default": _avg_pool2d,
    "aten.max_pool2d.default": _max_pool2d,
    "aten.adaptive_avg_pool2d.default": _adaptive_avg_pool2d,
    "aten.dropout.default": _dropout,
    "aten.feature_dropout.default": _dropout,
}
