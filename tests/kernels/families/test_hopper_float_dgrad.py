"""Gradients of float32 images by warpgroup products: that they build and run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.devices.cuda.flags import flags
from plantune.kernels.families.hopper_float_dgrad import FAMILY
from plantune.kernels.family import Candidate
from plantune.kernels.registry import why_not
from plantune.space.arch import load_arch

from .image_gradients import FIRST, MASKED, POOLED, SECOND, Gradient
from .test_hopper_float_conv import MATHS, config, with_planes

ARCH = load_arch("sm90")
SPACE = with_planes("hopper_float_dgrad")


@pytest.fixture(autouse=True)
def _tf32() -> Iterator[None]:
    """Rounding to tf32 is allowed."""
    with flags(torch.backends.cudnn.conv, fp32_precision="tf32"):
        yield


RUN = {
    "3x3": (Gradient(7, 64, (16, 16), 64), config(64, 64)),
    "odd": (Gradient(3, 72, (15, 10), 40), config(64, 64)),
    "reuse": (Gradient(3, 72, (14, 9), 40, parts=SECOND), config(64, 64, reuse=True)),
    "1x1": (Gradient(3, 96, (9, 9), 72, kernel=1), config(64, 64)),
    "one pixel": (Gradient(1, 8, (1, 1), 8), config(64, 64)),
    "two blocks": (Gradient(7, 128, parts=MASKED), config(64, 64, split_k=2)),
    "second": (Gradient(129, 128, (8, 8), 128, parts=SECOND), config(128, 64)),
    "the sum is read": (Gradient(parts=MASKED, leaves="add"), config(64, 64)),
    "channels": (Gradient(7, 200, (5, 3), 64, parts=("channels",)), config(64, 128)),
    "stride 2": (Gradient(3, 64, (16, 16), 128, stride=2, parts=FIRST), config(64, 64)),
    "stride 2, odd": (
        Gradient(3, 72, (15, 10), 40, stride=2, parts=("all", "relu_grad", "channels")),
        config(64, 64),
    ),
    "pooled": (Gradient(7, 128, (8, 8), 256, stride=2, parts=POOLED), config(64, 64)),
    "staying": (Gradient(130, 64, (16, 16), 64, parts=SECOND), config(128, 64)),
    "staying, pooled": (
        Gradient(270, 128, (8, 8), 256, stride=2, parts=POOLED),
        config(64, 64),
    ),
}


def candidate(name, math):
    return Candidate("hopper_float_dgrad", Attrs({**RUN[name][1], "math": math}))


@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("name", RUN)
def test_what_is_to_run_is_legal(step_of, name, math):
    assert why_not(step_of(RUN[name][0], "float32"), candidate(name, math), SPACE) is None


@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("name", ["second", "staying, pooled"])
def test_it_builds_without_spilling(step_of, build_within_limits, name, math):
    step = step_of(RUN[name][0], "float32")
    build_within_limits(FAMILY, step, candidate(name, math).config, ARCH)


@pytest.mark.gpu
@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("name", RUN)
def test_it_is_right(step_of, assert_right, name, math):
    assert_right(step_of(RUN[name][0], "float32"), candidate(name, math), SPACE)
