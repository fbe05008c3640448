"""Convolutions that read each weight once: what they run, in which sizes, and how threads share."""

from __future__ import annotations

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.kernels.build import build
from plantune.kernels.cpu.direct import panels
from plantune.kernels.families.direct_conv import FAMILY
from plantune.kernels.family import Candidate
from plantune.kernels.registry import resolve
from plantune.measure.threads import threads

from ..convolutions import WHOLE_END, conv

CONFIG = {"layout": "nhwc"}
CANDIDATE = Candidate("direct_conv", Attrs(CONFIG))
pytestmark = pytest.mark.usefixtures("as_with_a_compiler")


STEPS = {
    "3x3": conv(padding=(1, 1)),
    "no padding": conv(),
    "padding of two": conv(padding=(2, 2)),
    "other strides": conv(x=(2, 5, 9, 8), stride=(2, 3), padding=(1, 0)),
    "1x1": conv(kernel=(1, 1)),
    "1x1 of every second pixel": conv(kernel=(1, 1), stride=(2, 2)),
    "5x2": conv(kernel=(5, 2), padding=(2, 1)),
    "7x7 of large steps": conv(x=(2, 3, 15, 14), kernel=(7, 7), stride=(4, 4), padding=(3, 3)),
    "apart": conv(x=(1, 4, 9, 9), dilation=(2, 3), padding=(2, 3)),
    "all of it padding but one pixel": conv(x=(1, 16, 1, 1), padding=(1, 1)),
    "one channel": conv(x=(3, 1, 4, 4), outputs=1, padding=(1, 1)),
    "many channels": conv(x=(1, 2100, 3, 3), outputs=33, kernel=(1, 1)),
    **{
        f"{outputs} outputs": conv(x=(1, 8, 4, 4), outputs=outputs, padding=(1, 1))
        for outputs in (16, 24, 48, 64, 65, 96, 128)
    },
    "more pixels than a chunk has": conv(x=(1, 8, 13, 11), outputs=40, padding=(1, 1)),
    "the end of se_resnet9": conv(x=(1, 512, 2, 2), outputs=512, padding=(1, 1), parts=WHOLE_END),
}


@pytest.mark.parametrize("name", STEPS)
def test_it_is_right(step_of, require_right, name):
    require_right(step_of(STEPS[name]), "direct_conv", **CONFIG)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_more_threads_than_panels_share_their_pixels(step_of, require_right, monkeypatch, count):
    monkeypatch.setattr("plantune.measure.numerics.threads_of_proof", lambda step: count)
    with threads(count):
        require_right(step_of(STEPS["more pixels than a chunk has"]), "direct_conv", **CONFIG)


REFUSED = {
    "of groups": (conv(x=(2, 6, 6, 7), groups=3), "groups are other families'"),
    "of nothing": (conv(x=(0, 5, 6, 7)), "there are no images"),
    "with another end": (
        lambda b: b("affine", conv()(b), alpha=2.0, beta=0.0),
        "has no place in the epilogue",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_says_what_it_does_not_run(step_of, refusal, name):
    emit, reason = REFUSED[name]
    assert reason in refusal(step_of(emit), "direct_conv", **CONFIG)


def test_other_dtypes_are_refused(step_of, refusal):
    reason = refusal(step_of(conv(), "bfloat16"), "direct_conv", **CONFIG)
    assert reason == "it is written for float32, got bfloat16"


def test_without_a_compiler(step_of, refusal, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert "no C++ compiler was found" in refusal(step_of(conv()), "direct_conv", **CONFIG)


def test_a_guess_leaves_few_channels_and_few_outputs_to_others(step_of):
    def is_guessed(channels, outputs):
        step = step_of(conv(x=(1, channels, 4, 4), outputs=outputs))
        return FAMILY.can_be_guessed(FAMILY.parts(step), Attrs(CONFIG))

    assert is_guessed(16, 32)
    assert not is_guessed(3, 64)
    assert not is_guessed(64, 10)


@pytest.mark.parametrize("outputs", [1, 16, 17, 40, 64, 65, 96, 100, 512])
def test_panels_hold_each_weight_once_and_zeros_after_the_last_output(step_of, space, outputs):
    step = step_of(conv(x=(1, 8, 4, 4), outputs=outputs))
    width = build(resolve(step, CANDIDATE), space.arch).width(outputs)
    weight = torch.randn(outputs, 8, 3, 3)
    packed = panels(weight, width)
    assert packed.shape == (-(-outputs // width), 9, 8, width)
    back = packed.permute(0, 3, 2, 1).reshape(-1, 8, 3, 3)
    assert torch.equal(back[:outputs], weight)
    assert not back[outputs:].any()


def test_panels_leave_as_few_lanes_empty_as_any_do_and_are_wide(step_of, space):
    width = build(resolve(step_of(conv()), CANDIDATE), space.arch).width
    lanes = width(1)
    panels_of = {outputs: width(outputs * lanes) // lanes for outputs in range(1, 10)}
    assert panels_of == {1: 1, 2: 2, 3: 1, 4: 4, 5: 1, 6: 2, 7: 1, 8: 4, 9: 1}
