"""Convolutions and their gradients as autocast has them: factors of 16 bits, floats around them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..conftest import Builder, Emit

F32 = "float32"
IMAGE, CHANNELS = (3, 64, 9, 7), 64
PADDED: dict[str, Any] = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}


def filters(b: Builder) -> str:
    """In 16 bits: a pass casts float32 parameters before its first step."""
    return b.w(CHANNELS, CHANNELS, 3, 3)


def product(b: Builder, x: str | None = None) -> str:
    """In float32, of an image of 16 bits unless another is given."""
    return b.wide(b.conv(x or b.x(*IMAGE), filters(b), **PADDED))


def number(b: Builder) -> str:
    return b.w(1, dtype=F32)


def fixup(b: Builder) -> str:
    """Scalars promote; the next convolution reads 16 bits."""
    y = b("add", b("mul", product(b), number(b)), number(b))
    return b.cast(b("add", b("relu", y), number(b)))


def stream(b: Builder) -> str:
    """A residual stream of float32 stays so."""
    y = b("add_channel", product(b), b.w(CHANNELS, dtype=F32), axis=1)
    return b("relu", b("add", y, b.x(*IMAGE, dtype=F32)))


def stored_twice(b: Builder) -> tuple[str, str]:
    y = b("relu", b("add", product(b), b.wide(b.x(*IMAGE))))
    return y, b.cast(y)


def of_floats(b: Builder) -> str:
    """The image that autocast rounds is float32 in memory."""
    return b("relu", b("add", product(b, b.cast(b.x(*IMAGE, dtype=F32))), number(b)))


CONVOLUTIONS: Mapping[str, Emit] = {
    "fixup": fixup,
    "a stream of floats": stream,
    "stored twice": stored_twice,
}


def gradient(b: Builder) -> str:
    dy = b.x(*IMAGE)
    return b.wide(b("conv2d_dgrad", dy, filters(b), shape=IMAGE, **PADDED))


def through_a_relu(b: Builder) -> tuple[str, str]:
    """With the gradient of a float32 scalar before it."""
    dx = b("add", gradient(b), b.x(*IMAGE, dtype=F32))
    dx = b("relu_grad", dx, b.x(*IMAGE, dtype=F32))
    return dx, b("sum_to", dx, shape=(1,))


def narrow_result(b: Builder) -> str:
    dx = b("add", gradient(b), b.wide(b.x(*IMAGE)))
    return b.cast(b("relu_grad", dx, b.x(*IMAGE, dtype=F32)))


GRADIENTS: Mapping[str, Emit] = {
    "through a relu": through_a_relu,
    "narrow": narrow_result,
    "as it is": gradient,
}


def weight_gradient(b: Builder, kernel: int = 3) -> str:
    """Of a float32 parameter."""
    geometry = {**PADDED, "padding": (kernel // 2,) * 2}
    shape = (CHANNELS, CHANNELS, kernel, kernel)
    return b.wide(b("conv2d_wgrad", b.x(*IMAGE), b.x(*IMAGE), shape=shape, **geometry))


WEIGHTS: Mapping[str, Emit] = {"3x3": weight_gradient, "1x1": lambda b: weight_gradient(b, 1)}

MIXED: Mapping[str, Mapping[str, Emit]] = {
    "hopper_conv": CONVOLUTIONS,
    "hopper_dgrad": GRADIENTS,
    "hopper_wgrad": WEIGHTS,
}
