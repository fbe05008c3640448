"""Pools and the mean of pixels: which steps, which configs, that they are right."""

from __future__ import annotations

import math

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.kernels.families.pool import FAMILY
from plantune.kernels.family import Candidate
from plantune.kernels.registry import resolve
from plantune.measure.trial import NUMBERS, Trial

from .contract import Contract

CONFIG = Attrs(layout="nhwc", threads=256)


def pool(op, shape, kernel=(3, 3), stride=(2, 2), padding=(1, 1), **attrs):
    def emit(b):
        window = {"kernel": kernel, "stride": stride, "padding": padding, **attrs}
        return b.graph.emit(op, b.x(*shape), **window)

    return emit


def mean(shape, keepdim=False, dims=(2, 3)):
    return lambda b: b("mean", b.x(*shape), dims=dims, keepdim=keepdim)


def first(emit):
    return lambda b: emit(b)[0]


AVERAGE = {"count_padding": True}
STEPS = {
    "average": pool("avg_pool2d", (2, 16, 5, 7), **AVERAGE),
    "average without padding": pool("avg_pool2d", (2, 3, 5, 7), count_padding=False),
    "average of all": pool("avg_pool2d", (2, 8, 7, 7), (7, 7), (7, 7), (0, 0), **AVERAGE),
    "average of one": pool("avg_pool2d", (1, 1, 2, 2), (2, 2), (2, 2), (0, 0), **AVERAGE),
    "max and places": pool("max_pool2d", (2, 24, 5, 7)),
    "max, odd": first(pool("max_pool2d", (2, 3, 7, 5))),
    "max, of rectangles": pool("max_pool2d", (2, 8, 9, 7), (2, 5), (1, 3), (1, 2)),
    "max and taps": pool("max_pool2d_taps", (2, 24, 5, 7)),
    "max and taps, odd": pool("max_pool2d_taps", (2, 3, 7, 5)),
    "taps of rectangles": pool("max_pool2d_taps", (2, 12, 9, 7), (2, 5), (1, 3), (1, 2)),
    "taps of large windows": pool("max_pool2d_taps", (1, 8, 11, 9), (6, 5), (3, 2), (3, 1)),
    "mean": mean((3, 64, 5, 7)),
    "mean, axes stay": mean((2, 8, 3, 3), keepdim=True),
    "mean of many channels": mean((2, 512, 2, 2)),
    "mean of large images": mean((2, 48, 56, 56)),
}


REFUSED = {
    "a mean of channels": (mean((2, 8, 3, 3), dims=(1, 2)), "not that of an image's pixels"),
    "a mean of rows": (mean((2, 8, 3), dims=(2,)), "not that of an image's pixels"),
    "odd channels": (mean((2, 12, 3, 3)), "channels are read by eights"),
    "another op": (lambda b: b("relu", b.x(2, 8, 3, 3)), "only one pool"),
    "two ops": (lambda b: b("relu", STEPS["average"](b)[0]), "only one pool"),
    "a weight": (lambda b: b("mean", b.w(8, 8, 3, 3), dims=(2, 3), keepdim=False), "no images"),
    "another dtype": (STEPS["mean"], "got float64", "float64"),
    "only places": (lambda b: STEPS["max and places"](b)[1], "only the places are read"),
}


class TestContract(Contract):
    family, steps, refused = FAMILY, STEPS, REFUSED
    builds = ("average", "max and places", "mean", "max and taps")
    config = CONFIG
    configs = ((STEPS["mean"], Attrs(layout="nchw", threads=256), "nhwc"),)

    def check_usage(self, step, config, usage):
        super().check_usage(step, config, usage)
        assert all(used.shared_bytes <= 48 << 10 for used in usage.values())


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("op", ["max_pool2d", "max_pool2d_taps"])
def test_of_nan_and_equals_the_place_is_that_of_torch(step_of, gpu_space, op, layout):
    step = step_of(pool(op, (1, 8, 6, 6)), "float16")
    x = torch.randint(3, (1, 8, 6, 6), device="cuda").half()
    x[0, 1, 2, 2] = x[0, 2, 1, 1] = x[0, 2, 2, 2] = math.nan
    x[0, 3] = -math.inf
    candidate = Candidate("pool", Attrs(layout=layout, threads=128))
    trial = Trial(resolve(step, candidate), gpu_space.arch)
    trial.put_data({"x0": x})
    got = trial.run("run", NUMBERS)
    exact = step.evaluate({"x0": x})
    for name, _ in step.outputs:
        torch.testing.assert_close(got[name], exact[name], rtol=0, atol=0, equal_nan=True)
