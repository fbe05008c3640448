"""Every op alone, as steps of the table."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from plantune.graph.ops.functions import FUNCTIONS

from .conftest import Builder


def geometry(stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1):
    return {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}


def pool(kernel=(3, 3), stride=(2, 2), padding=(1, 1)):
    return {"kernel": kernel, "stride": stride, "padding": padding}


def product(transpose_a=False, transpose_b=True):
    return {"transpose_a": transpose_a, "transpose_b": transpose_b}


def scan(b, gates, states, *, resets=True):
    """What a scan of 4 steps, 2 samples and 5 hidden units reads."""
    given = [b.x(4, 2, gates * 5), *[b.x(2, 5) for _ in range(states)]]
    given += [b.w(gates * 5, 5), b.w(gates * 5)]
    return given + [b.x(4, 2, dtype="bool")] * resets


def translation(b, *words):
    """By GRUs of 3 hidden units, from 11 words to 7."""
    first, second = ((b.w(9, width), b.w(9, 3), b.w(9), b.w(9)) for width in (4, 7))
    weights = (b.w(11, 4), *first, b.w(7, 4), *second, b.w(7, 10), b.w(7))
    loop = {"begin": 0, "end": 1, "max_steps": 6, "lengths": len(words) > 1, "noise": False}
    return b.all("gru_translate", *words, *weights, **loop)


SINGLES: dict[str, Callable[[Builder], str | tuple[str, ...]]] = {
    "add": lambda b: b("add", b.x(2, 3, 5, 7), b.x(2, 3, 5, 7)),
    "add to itself": lambda b: b("add", *[b.x(2, 3, 5, 7)] * 2),
    "add a scalar": lambda b: b("add", b.x(2, 3, 5, 7), b.w(1)),
    "add per image": lambda b: b("add", b.x(2, 3, 5, 7), b.x(2, 3, 1, 1)),
    "add a row": lambda b: b("add", b.x(5, 7), b.x(7)),
    "add_apart": lambda b: b("add_apart", b.x(2, 3, 5, 7), b.w(1), step=2**-7, least=2**-24),
    "apart_grad": lambda b: b("apart_grad", b.x(2, 3, 5, 7), b.x(2, 3, 5, 7), b.w(1)),
    "sub": lambda b: b("sub", b.x(2, 3, 5, 7), b.x(2, 3, 5, 7)),
    "sub of constants": lambda b: b("sub", b.w(7), b.w(7)),
    "mul": lambda b: b("mul", b.x(2, 3, 5, 7), b.x(2, 3, 5, 7)),
    "mul by a scalar": lambda b: b("mul", b.x(2, 3, 5, 7), b.w(1)),
    "mul by a gate": lambda b: b("mul", b.x(2, 3, 5, 7), b.x(2, 3, 1, 1)),
    "add_channel": lambda b: b("add_channel", b.x(2, 3, 5, 7), b.w(3), axis=1),
    "add_channel of rows": lambda b: b("add_channel", b.x(5, 7), b.w(7), axis=1),
    "div": lambda b: b("div", b.x(2, 3, 5, 7), b.x(2, 3, 5, 7)),
    "div by a scalar": lambda b: b("div", b.x(2, 3, 5, 7), b.w(1)),
    "div by a row of channels": lambda b: b("div", b.x(2, 3, 5, 7), b.w(3, 1, 1)),
    "mul_channel": lambda b: b("mul_channel", b.x(2, 3, 5, 7), b.w(3), axis=1),
    "mul_channel, last axis": lambda b: b("mul_channel", b.x(2, 3, 5, 7), b.x(7), axis=3),
    "mul_channel of a weight": lambda b: b("mul_channel", b.w(4, 3, 3, 3), b.w(4), axis=0),
    "affine": lambda b: b("affine", b.x(2, 3, 5, 7), alpha=-1.5, beta=0.25),
    "affine, shift only": lambda b: b("affine", b.x(2, 3, 5, 7), alpha=1.0, beta=-2.0),
    "affine, scale only": lambda b: b("affine", b.x(2, 3, 5, 7), alpha=0.5, beta=0.0),
    "affine of a counter": lambda b: b("affine", b.x(dtype="int64"), alpha=1, beta=1),
    "affine of counters": lambda b: b("affine", b.x(3, dtype="int64"), alpha=-3, beta=7),
    "cast of bytes": lambda b: b("cast", b.x(2, 3, 5, 7, dtype="uint8"), dtype=b.dtype),
    "cast of counters": lambda b: b("cast", b.x(3, dtype="int64"), dtype=b.dtype),
    "cast to fewer digits": lambda b: b("cast", b.x(2, 3, 5, 7), dtype="float16"),
    "cast to more digits": lambda b: b("cast", b.x(2, 3, 5, 7), dtype="float64"),
    **{name: lambda b, name=name: b(name, b.x(2, 3, 5, 7)) for name in FUNCTIONS},
    **{
        f"{name}_grad": lambda b, name=name: b(f"{name}_grad", b.x(2, 3, 5, 7), b.x(2, 3, 5, 7))
        for name in FUNCTIONS
    },
    "relu of one value": lambda b: b("relu", b.x(1, 1, 1, 1)),
    "sigmoid_grad of rows": lambda b: b("sigmoid_grad", b.x(2, 3), b.x(2, 3)),
    "rsqrt": lambda b: b("rsqrt", b.w(19), eps=1e-5),
    "sum": lambda b: b("sum", b.x(2, 3, 5, 7), dims=(0, 2, 3), keepdim=False),
    "sum to one value": lambda b: b("sum", b.x(2, 3, 5, 7), dims=(0, 1, 2, 3), keepdim=False),
    "sum of rows": lambda b: b("sum", b.x(5, 7), dims=(0,), keepdim=False),
    "mean": lambda b: b("mean", b.x(2, 3, 5, 7), dims=(2, 3), keepdim=True),
    "mean without the axes": lambda b: b("mean", b.x(2, 3, 5, 7), dims=(2, 3), keepdim=False),
    "sum_to a scalar": lambda b: b("sum_to", b.x(2, 3, 5, 7), shape=(1,)),
    "sum_to nothing": lambda b: b("sum_to", b.x(2, 3, 5, 7), shape=()),
    "sum_to channels": lambda b: b("sum_to", b.x(2, 3, 5, 7), shape=(3, 1, 1)),
    "sum_to a gate": lambda b: b("sum_to", b.x(2, 3, 5, 7), shape=(2, 3, 1, 1)),
    "sum_to itself": lambda b: b("sum_to", b.x(2, 3, 5, 7), shape=(2, 3, 5, 7)),
    "broadcast_to": lambda b: b("broadcast_to", b.x(2, 3, 1, 1), shape=(2, 3, 5, 7)),
    "broadcast_to, new axes": lambda b: b("broadcast_to", b.x(7), shape=(2, 5, 7)),
    **{
        f"matmul {ta=} {tb=}": lambda b, ta=ta, tb=tb: b(
            "matmul",
            b.x(*((7, 5) if ta else (5, 7))),
            b.w(*((9, 7) if tb else (7, 9))),
            **product(ta, tb),
        )
        for ta, tb in itertools.product((False, True), repeat=2)
    },
    "matmul of one row": lambda b: b("matmul", b.x(1, 33), b.w(1, 33), **product()),
    "matmul of two inputs": lambda b: b("matmul", b.x(4, 5), b.x(4, 6), **product(True, False)),
    "avg_pool2d": lambda b: b("avg_pool2d", b.x(2, 3, 5, 7), **pool(), count_padding=True),
    "avg_pool2d, no padding": lambda b: b(
        "avg_pool2d", b.x(2, 3, 5, 7), **pool(), count_padding=False
    ),
    "avg_pool2d, one place": lambda b: b(
        "avg_pool2d", b.x(1, 1, 2, 2), **pool((2, 2), (2, 2), (0, 0)), count_padding=True
    ),
    "avg_pool2d_grad": lambda b: b(
        "avg_pool2d_grad", b.x(2, 3, 3, 4), **pool(), count_padding=True, shape=(2, 3, 5, 7)
    ),
    "max_pool2d": lambda b: b.all("max_pool2d", b.x(2, 3, 5, 7), **pool()),
    "max_pool2d, places unread": lambda b: b("max_pool2d", b.x(2, 3, 7, 5), **pool()),
    "max_pool2d_grad": lambda b: b(
        "max_pool2d_grad",
        b.x(2, 3, 3, 4),
        b.x(2, 3, 3, 4, dtype="int64"),
        **pool(),
        shape=(2, 3, 5, 7),
    ),
    "max_pool2d_taps": lambda b: b.all("max_pool2d_taps", b.x(2, 3, 5, 7), **pool()),
    "max_pool2d_taps_grad": lambda b: b(
        "max_pool2d_taps_grad",
        b.x(2, 3, 3, 4),
        b.x(2, 3, 3, 4, dtype="uint8"),
        **pool(),
        shape=(2, 3, 5, 7),
    ),
    "reshape": lambda b: b("reshape", b.x(2, 3, 5, 7), shape=(2, 105)),
    "reshape to an image": lambda b: b("reshape", b.x(2, 12), shape=(2, 3, 2, 2)),
    "reshape of an image": lambda b: b("reshape", b.x(2, 3, 4, 5), shape=(3, 2, 5, 4)),
    "reshape of one value": lambda b: b("reshape", b.w(1), shape=()),
    "permute": lambda b: b("permute", b.x(2, 3, 5, 7), dims=(3, 1, 0, 2)),
    "permute of a matrix": lambda b: b("permute", b.x(5, 7), dims=(1, 0)),
    "space_to_depth": lambda b: b("space_to_depth", b.x(2, 3, 4, 8), block=2),
    "depth_to_space": lambda b: b("depth_to_space", b.x(2, 12, 2, 4), block=2),
    "batch_norm": lambda b: b.all(
        "batch_norm", b.x(4, 3, 5, 7), b.w(3), b.w(3), b.x(3), b.x(3), eps=1e-5, momentum=0.1
    ),
    "batch_norm of one image": lambda b: b.all(
        "batch_norm", b.x(1, 5, 1, 2), b.w(5), b.w(5), b.x(5), b.x(5), eps=1e-5, momentum=0.3
    ),
    "batch_norm_grad": lambda b: b.all(
        "batch_norm_grad", b.x(4, 3, 5, 7), b.x(4, 3, 5, 7), b.w(3), b.x(3), b.x(3)
    ),
    "batch_norm_again": lambda b: b(
        "batch_norm_again", b.x(4, 3, 5, 7), b.w(3), b.w(3), b.x(3), b.x(3)
    ),
    "layer_norm": lambda b: b.all("layer_norm", b.x(5, 7), b.w(7), b.w(7), axes=1, eps=1e-5),
    "layer_norm of images": lambda b: b("layer_norm", b.x(2, 3, 4, 8), b.w(4, 8), axes=2, eps=1e-5),
    "layer_norm_grad": lambda b: b.all(
        "layer_norm_grad",
        *(b.x(4, 5), b.x(4, 5)),
        *(b.statistics(4, 1), b.statistics(4, 1), b.w(5)),
        **{"axes": 1, "eps": 1e-5, "affine": 2},
    ),
    "gru_scan": lambda b: b("gru_scan", *scan(b, 3, 1, resets=False), resets=False),
    "gru_scan of episodes": lambda b: b("gru_scan", *scan(b, 3, 1), resets=True),
    "gru_scan_grad": lambda b: b.all(
        "gru_scan_grad", *[b.x(4, 2, 5) for _ in range(2)], *scan(b, 3, 1), resets=True
    ),
    "lstm_scan": lambda b: b.all("lstm_scan", *scan(b, 4, 2), resets=True),
    "lstm_scan_grad": lambda b: b.all(
        "lstm_scan_grad", *[b.x(4, 2, 5) for _ in range(4)], *scan(b, 4, 2), resets=True
    ),
    "identity": lambda b: b("identity", b.x(2, 3, 5, 7)),
    "own_gradient": lambda b: b(
        "own_gradient", b.x(2, 3), b.x(2, 3), count=1, inputs=1, targets=(), backward=""
    ),
    "gru_translate": lambda b: translation(b, b.x(5, 3, dtype="int64"), b.x(3, dtype="int64")),
    "gru_translate of whole sentences": lambda b: translation(b, b.x(2, 1, dtype="int64")),
    "group_norm": lambda b: b.all(
        "group_norm", b.x(2, 6, 3, 5), b.w(6), b.w(6), groups=3, eps=1e-5
    ),
    "group_norm_grad": lambda b: b.all(
        "group_norm_grad",
        *(b.x(2, 6, 3, 5), b.x(2, 6, 3, 5)),
        *(b.x(2, 3), b.x(2, 3), b.w(6)),
        **{"groups": 3, "eps": 1e-5, "affine": 2},
    ),
}
