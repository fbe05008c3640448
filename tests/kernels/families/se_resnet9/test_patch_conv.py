"""Which stems are one convolution over patches."""

from __future__ import annotations

import pytest
import torch

from plantune.kernels.families.se_resnet9.patch_conv import _as_patch
from plantune.kernels.onednn import is_there

CONFIG = {"layout": "nhwc"}


def stem(b, block=2, kernel=1, **changed):
    moved = b("space_to_depth", b.x(2, 3, 8, 8), block=block)
    return b.conv(moved, b.w(4, 3 * block * block, kernel, kernel), **changed)


def test_a_stem_with_its_epilogue_is_covered(step_of, refusal):
    step = step_of(lambda b: b("add", b("relu", stem(b)), b.w(1)))
    assert refusal(step, "patch_conv", **CONFIG) is None


@pytest.mark.parametrize(
    ("emit", "reason"),
    [
        (lambda b: b.conv(b.x(2, 3, 8, 8), b.w(4, 3, 1, 1)), "does not start with space_to_depth"),
        (lambda b: stem(b, kernel=3), "only a 1x1 convolution of stride 1"),
        (lambda b: stem(b, stride=(2, 2)), "only a 1x1 convolution of stride 1"),
        (lambda b: stem(b, padding=(1, 1)), "only a 1x1 convolution of stride 1"),
        (
            lambda b: b("add", stem(b), b.x(2, 4, 4, 4)),
            "only a scale, bias, functions and an offset",
        ),
    ],
)
def test_it_says_what_it_does_not_cover(step_of, refusal, emit, reason):
    assert reason in refusal(step_of(emit), "patch_conv", **CONFIG)


def test_moved_pixels_that_are_read_elsewhere(step_of, refusal):
    def emit(b):
        moved = b("space_to_depth", b.x(2, 3, 8, 8), block=2)
        return moved, b.conv(moved, b.w(4, 12, 1, 1))

    assert "read outside of it" in refusal(step_of(emit), "patch_conv", **CONFIG)


def test_a_torch_without_onednn(step_of, refusal, monkeypatch):
    assert is_there()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert "without oneDNN" in refusal(step_of(stem), "patch_conv", **CONFIG)


def test_the_weight_is_read_in_the_order_of_the_patch():
    """Channel (dy * block + dx) * C + c is the tap (dy, dx) of channel c."""
    block, channels = 2, 3
    weight = torch.arange(4 * 12.0).view(4, 12, 1, 1)
    patch = _as_patch(weight, block)
    for dy in range(block):
        for dx in range(block):
            for c in range(channels):
                place = (dy * block + dx) * channels + c
                assert torch.equal(patch[:, c, dy, dx], weight[:, place, 0, 0])
