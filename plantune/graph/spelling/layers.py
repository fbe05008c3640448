"""How torch spells layers with weights, windows or a training mode."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from plantune.graph.spelling.reader import Reader, Spelled, Value, by_attributes
from plantune.graph.spelling.shapes import reshape
from plantune.layers import SpaceToDepth


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    if isinstance(value, (tuple, list)):
        first, second = value if len(value) == 2 else (value[0], value[0])
        return (first, second)
    return (value, value)


def _conv2d(
    g: Reader,
    x: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Value:
    if isinstance(padding, str):
        raise g.unsupported(f"padding={padding!r}: give it as numbers; a string")
    y = g.emit(
        "conv2d",
        x,
        weight,
        stride=_pair(stride),
        padding=_pair(padding),
        dilation=_pair(dilation),
        groups=groups,
    )
    return y if bias is None else g.emit("add_channel", y, bias, axis=1)


def _conv2d_module(g: Reader, m: nn.Conv2d, x: Value) -> Value:
    if m.padding_mode != "zeros":
        raise g.unsupported(f"padding_mode={m.padding_mode!r}")
    bias = None if m.bias is None else g.state(m.bias)
    weight = g.state(m.weight)
    return _conv2d(g, x, weight, bias, m.stride, m.padding, m.dilation, m.groups)


def _linear(g: Reader, x: Value, weight: Value, bias: Value | None = None) -> Value:
    shape = g.shape(x)
    rows = x if len(shape) == 2 else reshape(g, x, -1, shape[-1])
    y = g.emit("matmul", rows, weight, transpose_a=False, transpose_b=True)
    if bias is not None:
        y = g.emit("add_channel", y, bias, axis=1)
    return y if len(shape) == 2 else reshape(g, y, *shape[:-1], g.shape(weight)[0])


def _linear_module(g: Reader, m: nn.Linear, x: Value) -> Value:
    return _linear(g, x, g.state(m.weight), None if m.bias is None else g.state(m.bias))


def _batch_norm_module(g: Reader, m: nn.BatchNorm2d, x: Value) -> Value:
    if m.running_mean is None or m.running_var is None or m.weight is None:
        raise g.unsupported("a batch norm without running statistics or without affine weights")
    mean, var = g.state(m.running_mean), g.state(m.running_var)
    weight, bias = g.state(m.weight), g.state(m.bias)
    if not m.training:
        scale = g.emit("mul", weight, g.emit("rsqrt", var, eps=m.eps))
        shift = g.emit("sub", bias, g.emit("mul", mean, scale))
        return g.emit("add_channel", g.emit("mul_channel", x, scale, axis=1), shift, axis=1)
    if m.momentum is None:
        raise g.unsupported("a batch norm with momentum=None (a cumulative average)")
    y, _, _, new_mean, new_var = g.emit_all(
        "batch_norm", x, weight, bias, mean, var, eps=m.eps, momentum=m.momentum
    )
    g.update(m.running_mean, new_mean)
    g.update(m.running_var, new_var)
    if m.num_batches_tracked is not None:
        count = g.state(m.num_batches_tracked)
        g.update(m.num_batches_tracked, g.emit("affine", count, alpha=1, beta=1))
    return y


def _window(kernel: Any, stride: Any, padding: Any) -> dict[str, Any]:
    return {
        "kernel": _pair(kernel),
        "stride": _pair(kernel if stride is None or stride == () else stride),
        "padding": _pair(padding),
    }


def _avg_pool2d(
    g: Reader,
    x: Value,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    if ceil_mode or divisor_override is not None:
        raise g.unsupported("an average pool with ceil_mode or divisor_override")
    window = _window(kernel_size, stride, padding)
    return g.emit("avg_pool2d", x, **window, count_padding=count_include_pad)


def _max_pool2d(
    g: Reader,
    x: Value,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Value:
    if ceil_mode or return_indices or _pair(dilation) != (1, 1):
        raise g.unsupported("a max pool with ceil_mode, return_indices or dilation")
    return g.emit("max_pool2d", x, **_window(kernel_size, stride, padding))


def _adaptive_avg_pool2d(g: Reader, x: Value, output_size: Any) -> Value:
    if _pair(output_size) != (1, 1):
        raise g.unsupported(f"adaptive average pooling to {output_size}; only to (1, 1)")
    return g.emit("mean", x, dims=(2, 3), keepdim=True)


def _dropout(
    g: Reader, x: Value, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Value:
    if training and p > 0:
        raise g.unsupported("dropout in training mode")
    return x


def _space_to_depth(g: Reader, m: SpaceToDepth, x: Value) -> Value:
    return g.emit("space_to_depth", x, block=m.block)


SPELLED: Spelled = {
    nn.Conv2d: _conv2d_module,
    nn.Linear: _linear_module,
    nn.BatchNorm2d: _batch_norm_module,
    nn.AvgPool2d: by_attributes(_avg_pool2d),
    nn.MaxPool2d: by_attributes(_max_pool2d),
    nn.AdaptiveAvgPool2d: by_attributes(_adaptive_avg_pool2d),
    nn.Dropout: by_attributes(_dropout),
    SpaceToDepth: _space_to_depth,
    **dict.fromkeys((torch.conv2d, F.conv2d), _conv2d),
    **dict.fromkeys((torch.max_pool2d, F.max_pool2d), _max_pool2d),
    F.linear: _linear,
    F.avg_pool2d: _avg_pool2d,
    F.adaptive_avg_pool2d: _adaptive_avg_pool2d,
    F.dropout: _dropout,
}
