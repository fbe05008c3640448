"""The framework's own kernels pass the proof of a step, also where they are not very exact."""

from __future__ import annotations

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.graph.types import TensorType
from plantune.kernels.family import Candidate
from plantune.measure import scenes
from plantune.measure.numerics import check

from .conftest import caught, output

LAYOUTS = ("nchw", "nhwc")


@pytest.fixture
def of_one_pixel(step_of):
    """A norm of two numbers each. torch's kernel for channels_last loses three digits there."""

    def emit(b):
        x, *affine = (
            b.input("x", TensorType((16, 16, 1, 1))),
            *(b.parameter(name, TensorType((16,))) for name in ("weight", "bias")),
        )
        return b.emit("group_norm", x, *affine, groups=8, eps=1e-5)

    return step_of(emit)


@pytest.fixture
def gradient(step_of):
    """Of a hardswish in 16 bits: torch's kernels lose a NaN in images of two layouts."""
    image = TensorType((4, 64, 8, 8), "bfloat16")

    def emit(b):
        x, dy = b.input("x", image), b.input("dy", image)
        statistics = [b.input(name, TensorType((64,), "float32")) for name in ("mean", "invstd")]
        affine = [b.parameter(name, TensorType((64,), "bfloat16")) for name in ("weight", "bias")]
        (y,) = b.emit("batch_norm_again", x, *affine, *statistics)
        (dx,) = b.emit("hardswish_grad", dy, y)
        return b.emit("batch_norm_grad", dx, x, affine[0], *statistics)

    return step_of(emit)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(12))
def test_a_norm_of_one_pixel(of_one_pixel, space, layout, seed):
    check(of_one_pixel, Candidate("framework", Attrs(layout=layout)), space, seed)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(4))
def test_a_nan_that_torchs_kernels_lose_too(gradient, space, layout, seed):
    check(gradient, Candidate("framework", Attrs(layout=layout)), space, seed)


def test_images_of_one_pixel_are_stored_in_both_layouts():
    data = {"x": torch.randn(4, 8, 1, 1), "w": torch.randn(3, 5)}
    strides = {layout: scenes._stored(data, layout)["x"].stride() for layout in LAYOUTS}
    assert strides == {"nchw": (8, 1, 1, 1), "nhwc": (8, 1, 8, 8)}
    assert scenes._stored(data, "nhwc")["w"] is data["w"]


def test_other_roundings_are_not_made_for_what_is_right(relu, space, monkeypatch):
    """Proofs are nearly half of a search."""
    made = []
    monkeypatch.setattr("plantune.measure.trial.Trial.theirs", made.append)
    check(relu, Candidate("framework", Attrs(layout="nchw")), space)
    assert not made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_norm_of_one_pixel_whose_result_is_rounded(of_one_pixel, fake, check_fake, dtype):
    def twist(step, frame):
        y = output(step, frame)
        y.copy_(y.to(dtype))

    assert "relative error" in caught(check_fake, of_one_pixel, fake(twist))
