"""Steps whose operands have two or three element types, by the families that run them.

`b.dtype` is that of products, of 16 bits; `b.wide(x)` is x in float32.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..conftest import Builder, Emit

F32 = "float32"
IMAGE = (2, 16, 6, 5)
ODD = (2, 3, 5, 7)


def scalar(b: Builder) -> str:
    return b.w(1, dtype=F32)


def after_a_product(b: Builder, shape: tuple[int, ...] = IMAGE) -> str:
    """What follows a convolution under autocast: a float32 scalar, a residual of 16 bits."""
    y = b("add", b.wide(b.x(*shape)), scalar(b))
    y = b("add", b("relu", y), b.wide(b.x(*shape)))
    return b.cast(y)


def stored_twice(b: Builder) -> tuple[str, str]:
    y = b("relu", b("add", b.x(*IMAGE, dtype=F32), scalar(b)))
    return y, b.cast(y)


def rounded_inside(b: Builder) -> str:
    x = b.x(*IMAGE, dtype=F32)
    return b("sub", x, b.wide(b.cast(x, own=True)))


def three_types(b: Builder) -> tuple[str, str]:
    """The other type of 16 bits beside both."""
    other = "bfloat16" if b.dtype == "float16" else "float16"
    y = b("mul", b.wide(b.x(*IMAGE)), b.wide(b.x(*IMAGE, dtype=other)))
    y = b("add", y, b.x(*IMAGE, dtype=F32))
    return b.cast(y, other), b("relu", y)


def channels(b: Builder) -> str:
    y = b("mul_channel", b.wide(b.x(*IMAGE)), b.w(IMAGE[1], dtype=F32), axis=1)
    return b.cast(b("add_channel", y, b.w(IMAGE[1], dtype=F32), axis=1))


def of_bytes(b: Builder) -> str:
    image = b.wide(b.x(*IMAGE, dtype="uint8"))
    return b.cast(b("add", b("affine", image, alpha=1 / 255, beta=-0.5), b.x(*IMAGE, dtype=F32)))


POINTWISE: Mapping[str, Emit] = {
    "after a product": after_a_product,
    "after a product, odd": lambda b: after_a_product(b, ODD),
    "stored twice": stored_twice,
    "rounded inside": rounded_inside,
    "three types": three_types,
    "channels": channels,
    "bytes and floats": of_bytes,
    "a cast alone": lambda b: b.cast(b.x(*IMAGE, dtype=F32)),
    "rows of gates": lambda b: b("mul", b.x(*IMAGE, dtype=F32), b.wide(b.x(2, 16, 1, 1))),
}


def masked_sum(b: Builder) -> tuple[str, str, str]:
    """The gradient of a ReLU, as float32 and for a product, and that of the scalar before it."""
    dx = b("relu_grad", b.wide(b.x(*IMAGE)), b.x(*IMAGE, dtype=F32))
    return dx, b.cast(dx), b("sum_to", dx, shape=(1,))


POINTWISE_SUM: Mapping[str, Emit] = {
    "masked": masked_sum,
    "of channels, leaves wide": lambda b: b.wide(
        b("sum", b("relu_grad", b.x(*IMAGE), b.x(*IMAGE)), dims=(0, 2, 3), keepdim=False)
    ),
    "of an image's channels, leaves narrow": lambda b: b.cast(
        b("mean", b("mul", b.wide(b.x(*IMAGE)), scalar(b)), dims=(2, 3), keepdim=False)
    ),
    "of a product": lambda b: b(
        "sum_to", b("mul", b.x(*IMAGE, dtype=F32), b.wide(b.x(*IMAGE))), shape=(1,)
    ),
}

WINDOW = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1)}


def averaged(b: Builder, shape: tuple[int, ...]) -> str:
    return b("avg_pool2d", b.x(*shape, dtype=F32), count_padding=True, **WINDOW)


def best(b: Builder) -> tuple[str, str]:
    y, places = b.all("max_pool2d", b.wide(b.x(*IMAGE)), **WINDOW)
    return y, places


POOL: Mapping[str, Emit] = {
    "average, stored narrow": lambda b: b.cast(averaged(b, IMAGE)),
    "average, odd": lambda b: b.cast(averaged(b, ODD)),
    "average of narrow ones": lambda b: b(
        "avg_pool2d", b.wide(b.x(*IMAGE)), count_padding=False, **WINDOW
    ),
    "largest of narrow ones": best,
    "mean, stored narrow": lambda b: b.cast(
        b("mean", b.x(*IMAGE, dtype=F32), dims=(2, 3), keepdim=False)
    ),
    "mean of narrow ones": lambda b: b("mean", b.wide(b.x(*IMAGE)), dims=(2, 3), keepdim=False),
}


def pooled_gradient(b: Builder, shape: tuple[int, ...] = IMAGE) -> tuple[str, ...]:
    """Of a pool and of a product beside it, through a ReLU, with the gradient of a scalar."""
    n, c, h, w = shape
    dy = b.wide(b.x(n, c, (h + 1) // 2, (w + 1) // 2))
    dx = b("avg_pool2d_grad", dy, count_padding=True, shape=shape, **WINDOW)
    dx = b("add", dx, b.wide(b.x(*shape)))
    total = b("sum_to", dx, shape=(1,))
    dx = b("relu_grad", dx, b.x(*shape, dtype=F32))
    return total, dx, b.cast(dx)


POOL_GRAD: Mapping[str, Emit] = {
    "with a product's": pooled_gradient,
    "odd": lambda b: pooled_gradient(b, ODD),
    "alone, stored narrow": lambda b: b.cast(
        b(
            "avg_pool2d_grad",
            b.x(2, 16, 3, 3, dtype=F32),
            count_padding=True,
            shape=IMAGE,
            **WINDOW,
        )
    ),
}

MIXED: Mapping[str, Mapping[str, Emit]] = {
    "pointwise": POINTWISE,
    "pointwise_sum": POINTWISE_SUM,
    "pool": POOL,
    "pool_grad": POOL_GRAD,
}
