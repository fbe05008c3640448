"""Zeros, the smallest and the largest numbers among random ones."""

from __future__ import annotations

import pytest
import torch

from plantune.errors import WrongResult
from plantune.graph.types import TensorType
from plantune.kernels.registry import candidates
from plantune.measure.numerics import check
from plantune.measure.scenes import LARGE

IMAGE = TensorType((2, 3, 5, 7))


@pytest.fixture(params=["float64", "float32", "float16", "bfloat16"])
def relu(request, step_of):
    type_ = TensorType(IMAGE.shape, request.param)
    return step_of(lambda b: b.emit("relu", b.input("x", type_)))


def output(step, frame):
    return frame.values[step.outputs[0][0]]


def spoiled(where, value):
    """Writes a value wherever the input is as `where` says."""

    def twist(step, frame):
        x = frame.values["x"]
        output(step, frame).masked_fill_(where(x), value)

    return twist


def is_small(x):
    return (x != 0) & (x.abs() <= torch.finfo(x.dtype).tiny)


def is_negative_zero(x):
    return (x == 0) & x.signbit()


WRONG = {
    "denormals become NaN": (spoiled(is_small, torch.nan), "run on other data"),
    "so does zero": (spoiled(lambda x: x == 0, torch.nan), "first run"),
    "so does negative zero": (spoiled(is_negative_zero, torch.nan), "run on other data"),
    "the largest overflow": (spoiled(lambda x: x >= LARGE, torch.inf), "run with 65504"),
    "the largest are cut off": (spoiled(lambda x: (x > 60000) & x.isfinite(), 3e4), "run with"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_what_is_wrong_for_them_alone_is_rejected(relu, fake, check_fake, fault):
    twist, run = WRONG[fault]
    with pytest.raises(WrongResult, match=run):
        check_fake(relu, fake(twist))


def test_flushing_denormals_to_zero_is_not_wrong(relu, fake, check_fake):
    assert check_fake(relu, fake(spoiled(is_small, 0))).deterministic


@pytest.mark.parametrize("value", [1e4, torch.inf])
def test_where_pytorch_overflows_nothing_is_asked(step_of, fake, check_fake, value):
    """The sum of two large float16 is infinite in PyTorch, and finite in fp32."""

    def emit(b):
        x, y = (b.input(name, TensorType(IMAGE.shape, "float16")) for name in "xy")
        return b.emit("add", *b.emit("affine", x, alpha=2, beta=0), y)

    check_fake(step_of(emit), fake(spoiled(lambda x: x == LARGE, value)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_family_is_right_for_them(step_of, space, dtype):
    """A convolution, which some families transform first."""

    def emit(b):
        x = b.input("x", TensorType((2, 8, 8, 8), dtype))
        w = b.parameter("w", TensorType((16, 8, 3, 3), dtype))
        return b.emit("conv2d", x, w, stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1)

    step = step_of(emit)
    for candidate in candidates(step, space):
        for seed in range(4):
            check(step, candidate, space, seed)
