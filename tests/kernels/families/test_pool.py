"""Pools and the mean of pixels: which steps, which configs, that they are right."""

from __future__ import annotations

import math

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.kernels.cuda import pool_window
from plantune.kernels.families.pool import FAMILY
from plantune.kernels.family import Candidate
from plantune.kernels.registry import estimate_us, resolve
from plantune.measure.trial import NUMBERS, Trial
from plantune.space.arch import load_arch

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


# Of windows that share most of what they cover: where there are many, a thread makes a tile.
TILES = {
    "largest of each 3x3": first(pool("max_pool2d", (2, 24, 19, 7), (3, 3), (1, 1))),
    "largest, odd channels": first(pool("max_pool2d", (3, 7, 8, 9), (3, 3), (1, 1))),
    "largest of each 5x5": first(pool("max_pool2d", (1, 16, 17, 13), (5, 5), (2, 2), (2, 2))),
    "largest, wider than the image": first(
        pool("max_pool2d", (1, 8, 11, 3), (5, 5), (1, 1), (2, 2))
    ),
    "largest of rectangles": first(pool("max_pool2d", (2, 8, 19, 17), (5, 3), (2, 1), (1, 0))),
    "places of each 3x3": pool("max_pool2d", (2, 24, 19, 7), (3, 3), (1, 1)),
    "taps of each 3x3": pool("max_pool2d_taps", (2, 24, 19, 7), (3, 3), (1, 1)),
    "taps of each 5x5": pool("max_pool2d_taps", (1, 9, 18, 20), (5, 5), (2, 2), (2, 2)),
    "average of each 3x3": pool("avg_pool2d", (2, 24, 19, 7), (3, 3), (1, 1), **AVERAGE),
    "average of what is inside": pool(
        "avg_pool2d", (2, 12, 10, 17), (3, 3), (1, 1), count_padding=False
    ),
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


def of_large_images(monkeypatch):
    """As if there were many threads."""
    monkeypatch.setattr(pool_window, "THREADS_MIN", 0)


class TestTiles(Contract):
    family, steps, builds, config = FAMILY, TILES, tuple(TILES), CONFIG

    @pytest.fixture(autouse=True)
    def many_threads(self, monkeypatch):
        of_large_images(monkeypatch)

    def test_windows_that_overlap_are_made_together(self, name, dtype):
        step = self.step(TILES[name], dtype)
        rows, columns = FAMILY.parts(step).window.tile(CONFIG)
        assert rows > 1
        assert columns == 1 or name.startswith(("largest", "average"))
        assert "PoolTile<" in FAMILY.source(FAMILY.parts(step), CONFIG, load_arch("sm90"))


def test_few_windows_are_made_one_by_one(step_of):
    window = FAMILY.parts(step_of(TILES["largest of each 3x3"], "float16")).window
    assert window.tile(CONFIG) == (1, 1)
    assert window.threads(CONFIG) == window.y.numel // 8


def test_of_large_images_nhwc_is_the_quicker_layout(step_of):
    """In nchw single elements are read: 554 us instead of 272 (H200, 2026-11-29)."""
    arch = load_arch("sm90")
    step = step_of(first(pool("max_pool2d", (10, 480, 224, 224), (3, 3), (1, 1))), "float16")
    us = {
        layout: FAMILY.estimate_us(FAMILY.parts(step), Attrs(CONFIG, layout=layout), arch)
        for layout in ("nchw", "nhwc")
    }
    assert us["nhwc"] == pytest.approx(272, rel=0.2)
    assert us["nchw"] == pytest.approx(554, rel=0.2)


@pytest.mark.parametrize(("stride", "torchs_us"), [(1, 2956), (2, 920)])
def test_torchs_pools_are_known_to_be_slow(step_of, stride, torchs_us):
    """In float16 (H200, 2026-11-29)."""
    emit = pool("max_pool2d", (10, 480, 224, 224), (3, 3), (stride, stride))
    candidate = Candidate("framework", Attrs(layout="nhwc"))
    us = estimate_us(step_of(first(emit), "float16"), candidate, load_arch("sm90"))
    assert us == pytest.approx(torchs_us, rel=0.25)


@pytest.mark.gpu
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("op", ["max_pool2d", "max_pool2d_taps"])
def test_of_nan_and_equals_the_place_is_that_of_torch(
    step_of, gpu_space, monkeypatch, op, layout, stride
):
    of_large_images(monkeypatch)
    step = step_of(pool(op, (1, 8, 9, 6), stride=(stride, stride)), "float16")
    x = torch.randint(3, (1, 8, 9, 6), device="cuda").half()
    x[0, 1, 2, 2] = x[0, 2, 1, 1] = x[0, 2, 2, 2] = math.nan
    x[0, 3] = -math.inf
    candidate = Candidate("pool", Attrs(layout=layout, threads=128))
    trial = Trial(resolve(step, candidate), gpu_space.arch)
    trial.put_data({"x0": x})
    got = trial.run("run", NUMBERS)
    exact = step.evaluate({"x0": x})
    for name, _ in step.outputs:
        torch.testing.assert_close(got[name], exact[name], rtol=0, atol=0, equal_nan=True)
