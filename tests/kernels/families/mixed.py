"""Steps whose operands have two or three element types, by the families that run them.

`b.dtype` is that of products, of 16 bits; `b.wide(x)` is x in float32.
"""

from __future__ import annotations

from collections.abc import Mapping

from plantune.base.canonical import canonical

from ..conftest import Builder, Emit
from . import mixed_convolutions
from .mixed_squeeze import SE_GRAD, SE_TAIL

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

SAME = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
WIDE = (2, 24, 6, 5)


def convolved(b: Builder, channels: int = 16) -> str:
    """In float32, though the convolution is one of few digits."""
    image = b.x(2, channels, 6, 5)
    return b.wide(b.conv(image, b.w(WIDE[1], channels, 3, 3), padding=(1, 1)))


def fixup(b: Builder, channels: int = 16) -> str:
    y = b("mul", convolved(b, channels), scalar(b))
    y = b("relu", b("add", y, scalar(b)))
    return b.cast(b("add", y, scalar(b)))


def with_residual(b: Builder, residual: str, stored: str) -> str:
    added = b.x(*WIDE, dtype=residual)
    y = b("add_channel", convolved(b), b.w(WIDE[1], dtype=F32), axis=1)
    y = b("relu", b("add", y, added if residual == F32 else b.wide(added)))
    return y if stored == F32 else b.cast(y)


def scaled(b: Builder) -> str:
    """A layer scale, and a stream of float32."""
    y = b("mul_channel", convolved(b), b.w(WIDE[1], dtype=F32), axis=1)
    return b("add", y, b.x(*WIDE, dtype=F32))


def of_rows(b: Builder) -> str:
    y = b("matmul", b.x(9, 16), b.w(24, 16), transpose_a=False, transpose_b=True)
    y = b("add_channel", y, b.w(24), axis=1)
    return b("add", b.wide(y), b.x(9, 24, dtype=F32))


CONV: Mapping[str, Emit] = {
    "scalars": fixup,
    "scalars, odd channels": lambda b: fixup(b, 10),
    "stored wide": convolved,
    "a wide stream": scaled,
    "a wide residual": lambda b: with_residual(b, F32, b.dtype),
    "a narrow residual, stored wide": lambda b: with_residual(b, b.dtype, F32),
    "a narrow residual": lambda b: with_residual(b, b.dtype, b.dtype),
    "rows": of_rows,
}


def image_gradient(b: Builder) -> str:
    dy, w = b.x(2, 16, 6, 5), b.w(16, 24, 3, 3)
    return b.wide(b("conv2d_dgrad", dy, w, shape=WIDE, **SAME))


DGRAD: Mapping[str, Emit] = {
    "stored wide": image_gradient,
    "added to a wide one": lambda b: b("add", image_gradient(b), b.x(*WIDE, dtype=F32)),
    "added to a wide one, stored narrow": lambda b: b.cast(
        b("add", image_gradient(b), b.x(*WIDE, dtype=F32))
    ),
}
WGRAD: Mapping[str, Emit] = {
    "of a wide weight": lambda b: b.wide(
        b("conv2d_wgrad", b.x(2, 16, 6, 5), b.x(*WIDE), shape=(16, 24, 3, 3), **SAME)
    ),
}


def softmax(b: Builder, x: str) -> str:
    return b("aten.softmax.int", x, arguments=canonical({"self": {"tensor": 0}, "dim": -1}))


SOFTMAX: Mapping[str, Emit] = {
    "scores": lambda b: b.cast(softmax(b, b("add", b.wide(b.x(2, 3, 9, 9)), b.x(9, 9, dtype=F32)))),
    "stored wide": lambda b: softmax(b, b.wide(b.x(5, 96))),
}


def normed(b: Builder, op: str, shape: tuple[int, ...], weights: tuple[int, ...], **attrs: int):
    """A norm in float32 of what a product made, with a stream of float32, and its statistics."""
    affine = [b.w(*weights, dtype=F32), b.w(*weights, dtype=F32)]
    y, mean, _ = b.all(op, b.wide(b.x(*shape)), *affine, eps=1e-5, **attrs)
    y = b("relu", b("add", y, b.x(*shape, dtype=F32)))
    return b.cast(y), mean


def norm_gradient(
    b: Builder,
    op: str,
    shape: tuple[int, ...],
    statistics: tuple[int, ...],
    weights: tuple[int, ...],
    **attrs: int,
) -> tuple[str, ...]:
    kept = [b.x(*statistics, dtype=F32) for _ in range(2)]
    given = (b.wide(b.x(*shape)), b.x(*shape, dtype=F32), *kept, b.w(*weights, dtype=F32))
    dx, dweight, dbias = b.all(f"{op}_grad", *given, eps=1e-5, affine=2, **attrs)
    return b.cast(dx), dweight, dbias


LAYER_NORM: Mapping[str, Emit] = {
    "of a product": lambda b: normed(b, "layer_norm", (9, 48), (48,), axes=1),
    "odd": lambda b: normed(b, "layer_norm", (5, 37), (37,), axes=1),
    "of a stream, stored narrow": lambda b: b.cast(
        b.all("layer_norm", b.x(9, 64, dtype=F32), b.w(64, dtype=F32), axes=1, eps=1e-5)[0]
    ),
}
LAYER_NORM_GRAD: Mapping[str, Emit] = {
    "of a product": lambda b: norm_gradient(b, "layer_norm", (9, 48), (9, 1), (48,), axes=1),
    "odd": lambda b: norm_gradient(b, "layer_norm", (5, 37), (5, 1), (37,), axes=1),
}
GROUP_NORM: Mapping[str, Emit] = {
    "of a product": lambda b: normed(b, "group_norm", (2, 32, 6, 5), (32,), groups=4),
    "odd": lambda b: normed(b, "group_norm", (2, 6, 5, 7), (6,), groups=2),
}
GROUP_NORM_GRAD: Mapping[str, Emit] = {
    "of a product": lambda b: norm_gradient(
        b, "group_norm", (2, 32, 6, 5), (2, 4), (32,), groups=4
    ),
    "odd": lambda b: norm_gradient(b, "group_norm", (2, 6, 5, 7), (2, 2), (6,), groups=2),
}


def linear(b: Builder, *, rows: str, stored: str) -> str:
    """A layer of few rows, which a mean made in float32 or a product in fewer digits."""
    x = b.x(5, 48, dtype=rows)
    y = b.linear(b.cast(x) if rows == F32 else x, b.w(16, 48))
    y = b("sigmoid", b("add_channel", y, b.w(16), axis=1))
    return b.wide(y) if stored == F32 else y


LINEAR: Mapping[str, Emit] = {
    "of wide rows": lambda b: linear(b, rows=F32, stored=b.dtype),
    "stored wide": lambda b: linear(b, rows=b.dtype, stored=F32),
    "both": lambda b: linear(b, rows=F32, stored=F32),
}


def joined(b: Builder, *images: str) -> str:
    tensors = [{"tensor": at} for at in range(len(images))]
    given = canonical({"tensors": tensors, "dim": 1})
    return b("aten.cat.default", *images, arguments=given)


def joined_and_normed(b: Builder) -> str:
    y = joined(b, b.wide(b.x(2, 8, 5, 3)), b.x(2, 16, 5, 3, dtype=F32), b.wide(b.x(2, 24, 5, 3)))
    y = b("mul_channel", y, b.w(48, dtype=F32), axis=1)
    return b.cast(b("relu", b("add_channel", y, b.w(48, dtype=F32), axis=1)))


CONCAT: Mapping[str, Emit] = {
    "two types, stored narrow": joined_and_normed,
    "stored wide": lambda b: b.wide(joined(b, b.x(2, 8, 5, 3), b.x(2, 3, 5, 3))),
    "two types, odd": lambda b: joined(b, b.x(2, 3, 5, 3, dtype=F32), b.wide(b.x(2, 5, 5, 3))),
}


def stem(b: Builder, *, moved: bool = False) -> tuple[str, ...]:
    """Of images in float32, with a scalar of float32; what autocast makes of them may be kept."""
    patches = b.cast(b("space_to_depth", b.x(2, 3, 24, 16, dtype=F32), block=4))
    y = b("relu", b.conv(patches, b.w(32, 48, 1, 1)))
    shifted = b.cast(b("add", b.wide(y), scalar(b)))
    return (shifted, y, patches) if moved else (shifted,)


STEM: Mapping[str, Emit] = {
    "of wide images": stem,
    "all leaves": lambda b: stem(b, moved=True),
    "stored wide": lambda b: b.wide(
        b.conv(
            b.cast(b("space_to_depth", b.x(2, 3, 24, 16, dtype=F32), block=4)), b.w(32, 48, 1, 1)
        )
    ),
}

MIXED: Mapping[str, Mapping[str, Emit]] = {
    "stem": STEM,
    "linear": LINEAR,
    "concat": CONCAT,
    "layer_norm": LAYER_NORM,
    "layer_norm_grad": LAYER_NORM_GRAD,
    "group_norm": GROUP_NORM,
    "group_norm_grad": GROUP_NORM_GRAD,
    "implicit_gemm_conv": CONV,
    "implicit_gemm_dgrad": DGRAD,
    "implicit_gemm_wgrad": WGRAD,
    "pointwise": POINTWISE,
    "pointwise_sum": POINTWISE_SUM,
    "pool": POOL,
    "pool_grad": POOL_GRAD,
    "se_grad": SE_GRAD,
    "se_tail": SE_TAIL,
    "softmax": SOFTMAX,
    **mixed_convolutions.MIXED,
}
