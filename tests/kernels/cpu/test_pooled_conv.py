"""Average pools with their convolution on a CPU: in which sizes, and which are refused."""

from __future__ import annotations

import pytest

CONFIG = {"layout": "nhwc"}
pytestmark = pytest.mark.usefixtures("as_with_a_compiler")


def pooled(
    x=(2, 19, 8, 6), outputs=33, kernel=(2, 2), stride=(2, 2), padding=(0, 0), counts=True, conv=1
):
    def emit(b):
        window = {"kernel": kernel, "stride": stride, "padding": padding}
        means = b("avg_pool2d", b.x(*x), **window, count_padding=counts)
        return b.conv(means, b.w(outputs, x[1], conv, conv), padding=(conv // 2, conv // 2))

    return emit


STEPS = {
    "2x2": pooled(),
    "3x3 with padding": pooled(kernel=(3, 3), padding=(1, 1)),
    "windows that overlap": pooled(kernel=(3, 3), stride=(1, 1)),
    "windows of unequal sides": pooled(kernel=(4, 2), stride=(3, 1), padding=(2, 0)),
    "of a whole image": pooled(kernel=(8, 6), stride=(8, 6), outputs=1),
    "not counting padding that is not there": pooled(counts=False),
    "more pixels than a chunk has": pooled(x=(1, 40, 26, 22), outputs=70),
    "many channels": pooled(x=(1, 1030, 4, 4), outputs=8),
    "with an offset": lambda b: b("add", b("relu", pooled()(b)), b.w(1)),
    "with an end": lambda b: b("relu", b("add_channel", pooled()(b), b.w(33), axis=1)),
}


@pytest.mark.parametrize("name", STEPS)
def test_it_is_right(step_of, require_right, name):
    require_right(step_of(STEPS[name]), "pooled_conv", **CONFIG)


WINDOW = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0), "count_padding": True}


def of_a_weight(b):
    means = b("avg_pool2d", b.w(2, 19, 8, 6), **WINDOW)
    return b("add_channel", b.conv(means, b.w(33, 19, 1, 1)), b.w(33), axis=1)


def read_elsewhere(b):
    means = b("avg_pool2d", b.x(2, 19, 8, 6), **WINDOW)
    return means, b.conv(means, b.w(33, 19, 1, 1))


REFUSED = {
    "padding that does not count": (
        pooled(kernel=(3, 3), padding=(1, 1), counts=False),
        "padding counts as zeros here",
    ),
    "a larger kernel": (pooled(conv=3), "only a 1x1 convolution of stride 1"),
    "of nothing": (pooled(x=(0, 19, 8, 6)), "there are no images"),
    "of an image that is a weight": (of_a_weight, "is constant, not an image"),
    "a pool that is read elsewhere": (read_elsewhere, "read outside of it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_says_what_it_does_not_run(step_of, refusal, name):
    emit, reason = REFUSED[name]
    assert reason in refusal(step_of(emit), "pooled_conv", **CONFIG)


def test_other_dtypes_are_refused(step_of, refusal):
    reason = refusal(step_of(pooled(), "float64"), "pooled_conv", **CONFIG)
    assert reason == "it is written for float32, got float64"
