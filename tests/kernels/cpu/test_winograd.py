"""Convolutions in tiles: which they are, in which sizes, and how threads share them."""

from __future__ import annotations

import ctypes

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.kernels.families.winograd import FAMILY, WEIGHT_TRANSFORMS, scratch_bytes
from plantune.measure.threads import threads

from ..convolutions import WHOLE_END, conv

CONFIG = {"layout": "nhwc"}
SAME = {"padding": (1, 1)}
pytestmark = pytest.mark.usefixtures("as_with_a_compiler")

STEPS = {
    **{
        f"images of {rows}x{columns}": conv(x=(3, 5, rows, columns), **SAME)
        for rows, columns in ((1, 1), (1, 2), (2, 2), (2, 4), (3, 3), (5, 8), (7, 7), (16, 16))
    },
    "no padding": conv(),
    "padding above alone": conv(padding=(1, 0)),
    "padding of two": conv(padding=(2, 2)),
    "2x2 in padding of two": conv(x=(2, 5, 2, 2), padding=(2, 2)),
    **{
        f"{channels} channels": conv(x=(2, channels, 4, 4), **SAME) for channels in (1, 16, 21, 600)
    },
    **{f"{n} outputs": conv(x=(2, 8, 4, 4), outputs=n, **SAME) for n in (1, 24, 48, 64, 65, 128)},
    "more tiles than two blocks have": conv(x=(3, 16, 12, 11), outputs=40, **SAME),
    "padding that some outputs see alone": conv(padding=(5, 3)),
    "more tiles of 2x2 than two blocks have": conv(x=(70, 9, 2, 2), outputs=40, **SAME),
    "the whole end": conv(x=(3, 40, 9, 6), outputs=70, parts=WHOLE_END, **SAME),
    "the end of se_resnet9": conv(x=(1, 512, 2, 2), outputs=512, parts=WHOLE_END, **SAME),
}


@pytest.mark.parametrize("name", STEPS)
def test_it_is_right(step_of, require_right, name):
    require_right(step_of(STEPS[name]), "winograd", **CONFIG)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "name",
    [
        "more tiles than two blocks have",
        "more tiles of 2x2 than two blocks have",
        "65 outputs",
        "the end of se_resnet9",
    ],
)
def test_threads_share_tiles_or_panels(step_of, require_right, monkeypatch, count, name):
    monkeypatch.setattr("plantune.measure.numerics.threads_of_proof", lambda step: count)
    with threads(count):
        require_right(step_of(STEPS[name]), "winograd", **CONFIG)


def test_no_more_threads_run_than_there_is_memory_for(step_of, require_right, monkeypatch):
    """Their number may have changed since."""
    step = step_of(STEPS["more tiles than two blocks have"])
    with threads(1):
        needed = FAMILY.workspace_bytes(FAMILY.parts(step), Attrs(CONFIG))
    assert needed == scratch_bytes(108, 16)
    monkeypatch.setattr("plantune.measure.numerics.threads_of_proof", lambda step: 3)
    monkeypatch.setattr(type(FAMILY), "workspace_bytes", lambda *_: needed)
    with threads(3):
        require_right(step, "winograd", **CONFIG)


@pytest.mark.parametrize(("tiles", "channels"), [(1, 600), (31, 1), (32, 64), (1000, 64)])
def test_memory_of_a_thread_is_what_the_kernel_takes(step_of, tiles, channels):
    needed = FAMILY.library(FAMILY.parts(step_of(STEPS["1 channels"]))).winograd_scratch
    needed.restype = ctypes.c_size_t
    assert 4 * needed(tiles, channels) == scratch_bytes(tiles, channels)


OTHER = "only 3x3 convolutions of stride 1"
REFUSED = {
    "1x1": (conv(kernel=(1, 1)), OTHER),
    "of every second pixel": (conv(stride=(2, 2), **SAME), OTHER),
    "apart": (conv(dilation=(2, 2)), OTHER),
    "of groups": (conv(x=(2, 6, 6, 7), groups=3), "groups are other families'"),
    "of nothing": (conv(x=(0, 5, 6, 7)), "there are no images"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_says_what_it_does_not_run(step_of, refusal, name):
    emit, reason = REFUSED[name]
    assert reason in refusal(step_of(emit), "winograd", **CONFIG)


def test_other_dtypes_are_refused(step_of, refusal):
    reason = refusal(step_of(conv(), "bfloat16"), "winograd", **CONFIG)
    assert reason == "it is written for float32, got bfloat16"


@pytest.mark.parametrize(
    ("x", "is_guessed"),
    [
        ((2, 8, 4, 4), True),
        ((2, 7, 4, 4), False),  # few channels
        ((1, 8, 4, 4), False),  # few tiles
        ((1, 8, 5, 5), True),
        ((1, 8, 2, 2), True),  # as many factors as weights
    ],
)
def test_guesses_leave_few_channels_and_few_tiles_to_others(step_of, x, is_guessed):
    parts = FAMILY.parts(step_of(conv(x=x, **SAME)))
    assert FAMILY.can_be_guessed(parts, Attrs(CONFIG)) == is_guessed


def test_without_a_compiler(step_of, refusal, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert "no C++ compiler was found" in refusal(step_of(conv(**SAME)), "winograd", **CONFIG)


@pytest.mark.parametrize("algorithm", WEIGHT_TRANSFORMS)
def test_the_weight_transform_belongs_to_the_other_two(algorithm):
    """A [(G w) * (B x)] is the convolution of a row: B and A as the kernel has them."""
    w = torch.tensor([2.0, -3.0, 5.0], dtype=torch.float64)
    g = torch.tensor(WEIGHT_TRANSFORMS[algorithm], dtype=torch.float64)
    if algorithm == "winograd":
        x = torch.tensor([1.0, 7.0, -2.0, 4.0], dtype=torch.float64)
        v = torch.stack([x[0] - x[2], x[1] + x[2], x[2] - x[1], x[1] - x[3]])
        m = (g @ w) * v
        y = torch.stack([m[0] + m[1] + m[2], m[1] - m[2] - m[3]])
        padded = x
    else:
        x = torch.tensor([7.0, -2.0], dtype=torch.float64)
        m = (g @ w) * torch.stack([x[0], x[0] + x[1], x[1]])
        y = torch.stack([m[1] + m[2], m[1] + m[0]])
        padded = torch.nn.functional.pad(x, (1, 1))
    expected = torch.stack([(w * padded[i : i + 3]).sum() for i in range(2)])
    torch.testing.assert_close(y, expected)
