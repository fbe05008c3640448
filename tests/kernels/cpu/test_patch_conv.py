"""First convolutions on a CPU: which they are, in which sizes, and what leaves them."""

from __future__ import annotations

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.kernels.families.patch_conv import FAMILY, as_patch

CONFIG = {"layout": "nhwc"}
pytestmark = pytest.mark.usefixtures("as_with_a_compiler")


def first(x=(2, 3, 9, 10), outputs=9, kernel=(3, 3), **geometry):
    return lambda b: b.conv(b.x(*x), b.w(outputs, x[1], *kernel), **geometry)


def stem(b, block=2, kernel=1, x=(2, 3, 8, 8), outputs=4, **changed):
    moved = b("space_to_depth", b.x(*x), block=block)
    return b.conv(moved, b.w(outputs, x[1] * block * block, kernel, kernel), **changed)


def shifted(b):
    """A stem whose value before the offset leaves, too."""
    before = b("relu", stem(b, block=4, outputs=65))
    return before, b("add", before, b.w(1))


def everything(b):
    y = first(padding=(1, 1))(b)
    for part in ("mul_channel", "add_channel"):
        y = b(part, y, b.w(9), axis=1)
    before = b("relu", b("add", y, b.x(2, 9, 9, 10)))
    return before, b("add", before, b.w(1))


def onto_itself(b):
    image = b.x(2, 9, 6, 7)
    return b("add", b.conv(image, b.w(9, 9, 3, 3), padding=(1, 1)), image)


STEPS = {
    "3x3": first(padding=(1, 1)),
    "3x3 of every second pixel": first(padding=(1, 1), stride=(2, 2)),
    "4x4 of every fourth": first(kernel=(4, 4), stride=(4, 4)),
    "5x5": first(kernel=(5, 5), padding=(2, 2), outputs=70),
    "7x7": first(x=(2, 3, 15, 14), kernel=(7, 7), stride=(2, 2), padding=(3, 3)),
    "8x8 of every fourth": first(x=(2, 4, 20, 20), kernel=(8, 8), stride=(4, 4)),
    "3x2": first(kernel=(3, 2), padding=(1, 0)),
    "apart": first(padding=(2, 3), dilation=(2, 3)),
    "larger than the image": first(x=(1, 1, 2, 2), kernel=(5, 5), padding=(2, 2)),
    "sixteen channels": first(x=(1, 16, 13, 11), padding=(1, 1)),
    "one channel of one pixel": first(x=(1, 1, 1, 1), outputs=1, kernel=(1, 1)),
    "a stem": stem,
    "a stem of larger patches": lambda b: b("relu", stem(b, block=4, x=(3, 11, 16, 8))),
    "a stem with an offset": lambda b: b("add", b("relu", stem(b)), b.w(1)),
    "a stem of which two values leave": shifted,
    "a stem whose convolution is dilated, which means nothing": lambda b: stem(b, dilation=(2, 2)),
    "with a residual": lambda b: b("add", first(padding=(1, 1))(b), b.x(2, 9, 9, 10)),
    "with a norm and a residual of which two values leave": everything,
    "larger patches than a sum is long": first(x=(1, 3, 24, 23), kernel=(22, 23)),
    "a patch of the most pixels": first(x=(1, 2, 16, 32), kernel=(16, 32)),
}


@pytest.mark.parametrize("name", STEPS)
def test_it_is_right(step_of, require_right, name):
    require_right(step_of(STEPS[name]), "patch_conv", **CONFIG)


def read_elsewhere(b):
    moved = b("space_to_depth", b.x(2, 3, 8, 8), block=2)
    return moved, b.conv(moved, b.w(4, 12, 1, 1))


REFUSED = {
    "many channels": (first(x=(1, 17, 4, 4)), "at most 16 channels, got 17"),
    "of groups": (
        lambda b: b.conv(b.x(1, 4, 5, 5), b.w(4, 2, 3, 3), groups=2),
        "groups are other families'",
    ),
    "of nothing": (first(x=(0, 3, 9, 10)), "there are no images"),
    "large patches": (first(x=(1, 3, 24, 23), kernel=(23, 23)), "at most 512 pixels, got 529"),
    "a sum with its own image": (onto_itself, "the residual is the image"),
    "a larger kernel after the patches": (
        lambda b: stem(b, kernel=3),
        "only a 1x1 convolution of stride 1",
    ),
    "steps over patches": (
        lambda b: stem(b, stride=(2, 2)),
        "only a 1x1 convolution of stride 1",
    ),
    "an image that is added to a stem": (
        lambda b: b("add", stem(b), b.x(2, 4, 4, 4)),
        "only a bias, functions and an offset",
    ),
    "moved pixels that are read elsewhere": (read_elsewhere, "read outside of it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_says_what_it_does_not_run(step_of, refusal, name):
    emit, reason = REFUSED[name]
    assert reason in refusal(step_of(emit), "patch_conv", **CONFIG)


def test_other_dtypes_are_refused(step_of, refusal):
    reason = refusal(step_of(stem, "bfloat16"), "patch_conv", **CONFIG)
    assert reason == "it is written for float32, got bfloat16"


def test_guesses_take_it_for_patches_alone(step_of):
    def is_guessed(emit):
        return FAMILY.can_be_guessed(FAMILY.parts(step_of(emit)), Attrs(CONFIG))

    assert is_guessed(stem)
    assert not is_guessed(first())


def test_the_weight_is_read_in_the_order_of_the_patch():
    """Channel (dy * block + dx) * C + c is the tap (dy, dx) of channel c."""
    block, channels = 2, 3
    weight = torch.arange(4 * 12.0).view(4, 12, 1, 1)
    patch = as_patch(weight, block)
    for dy in range(block):
        for dx in range(block):
            for c in range(channels):
                place = (dy * block + dx) * channels + c
                assert torch.equal(patch[:, c, dy, dx], weight[:, place, 0, 0])
