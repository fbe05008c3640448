from __future__ import annotations

import pytest

CONV_REASON = "only a 1x1 convolution of stride 1 without padding and groups is a matrix product"


def conv(b, shape=(2, 4, 5, 5), weight=(6, 4, 1, 1), **attrs):
    return b.conv(b.x(*shape), b.w(*weight), **attrs)


REFUSED = {
    "another op": (
        lambda b: b("relu", b.x(2, 3)),
        "only a 1x1 convolution, or a matrix product with bias and activation",
    ),
    "an activation without a bias": (
        lambda b: b("relu", b.linear(b.x(2, 3), b.w(4, 3))),
        "only a matrix product with bias and activation",
    ),
    "a bias per row": (
        lambda b: b("add_channel", b.linear(b.x(2, 3), b.w(4, 3)), b.w(2), axis=0),
        "the bias is not one per column",
    ),
    "a product that is read outside": (
        lambda b: (y := b.linear(b.x(2, 3), b.w(4, 3)), b("add_channel", y, b.w(4), axis=1)),
        "a value before the end of the step is read outside of it",
    ),
    "a bias of something else": (
        lambda b: (b.linear(b.x(2, 3), b.w(4, 3)), b("add_channel", b.x(2, 4), b.w(4), axis=1))[1],
        "does not read",
    ),
    "3x3": (lambda b: conv(b, weight=(6, 4, 3, 3)), CONV_REASON),
    "stride": (lambda b: conv(b, stride=(2, 1)), CONV_REASON),
    "padding": (lambda b: conv(b, padding=(0, 1)), CONV_REASON),
    "groups": (lambda b: conv(b, weight=(6, 2, 1, 1), groups=2), CONV_REASON),
    "no epilogue": (
        lambda b: b("affine", conv(b), alpha=2.0, beta=0.0),
        "affine at 'affine' has no place",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_each_reason(step_of, refusal, name):
    emit, reason = REFUSED[name]
    assert reason in refusal(step_of(emit), "gemm", layout="nchw")


def test_matrices_have_no_images(step_of, refusal):
    step = step_of(lambda b: b.linear(b.x(2, 3), b.w(4, 3)))
    assert refusal(step, "gemm", layout="nchw") is None
    assert refusal(step, "gemm", layout="nhwc") == (
        "a matrix product has no image, so its layout is nchw"
    )


def test_a_config_that_is_not_in_the_space_is_refused(step_of, refusal):
    assert "is not in the search space" in refusal(step_of(conv), "gemm", layout="nchw", split_k=2)
