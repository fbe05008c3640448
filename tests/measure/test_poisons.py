"""Where a NaN or an infinity in one element may show, and where it must not."""

from __future__ import annotations

from plantune.graph.types import TensorType

from .conftest import caught, output


def test_a_nan_that_reaches_another_image(relu, fake, check_fake):
    def twist(step, frame):
        output(step, frame).add_(frame.values["x"].sum() * 0)

    message = caught(check_fake, relu, fake(twist))
    assert "run with nan in one element of 'x'" in message
    assert "has NaN or infinity, where the reference is finite" in message


def test_a_number_too_large_for_its_dtype_is_no_nan_of_another_image(step_of, fake, check_fake):
    def emit(b):
        value = b.input("x", TensorType((64, 8), "float16"))
        for _ in range(4):
            (value,) = b.emit("mul", value, value)
        return (value,)

    def honest(step, frame):
        output(step, frame).copy_(frame.values["x"].double() ** 16)

    check_fake(step_of(emit), fake(honest))


def test_the_mean_of_a_row_with_an_infinity_may_be_infinite(step_of, fake, check_fake):
    """PyTorch's is NaN."""

    def emit(b):
        x = b.input("x", TensorType((2, 3, 5, 16)))
        return b.emit("layer_norm", x, axes=1, eps=1e-5)

    def honest(step, frame):
        x, made = frame.values["x"], [frame.values[name] for name, _ in step.outputs]
        mean = x.sum(-1, keepdim=True) / 16
        rstd = ((x - mean).square().sum(-1, keepdim=True) / 16 + 1e-5).rsqrt()
        for value, found in zip(made, ((x - mean) * rstd, mean, rstd), strict=True):
            value.copy_(found)

    check_fake(step_of(emit), fake(honest))


def test_a_nan_may_spread_in_its_own_image(relu, fake, check_fake):
    def twist(step, frame):
        output(step, frame).add_(frame.values["x"].sum((1, 2, 3), keepdim=True) * 0)

    assert check_fake(relu, fake(twist)).error == 0


def hidden(b):
    """Of an infinity the ReLU makes zero."""
    x = b.input("x", TensorType((2, 1, 1, 1)))
    return b.emit("relu", b.emit("affine", x, alpha=-1.0, beta=0.0)[0])


def subtracting(step, frame):
    x = frame.values["x"]
    output(step, frame).copy_((-x + 0 * x).relu())


def test_an_infinity_that_becomes_finite_is_no_nan(step_of, fake, check_fake):
    message = caught(check_fake, step_of(hidden), fake(subtracting))
    assert "run with inf in one element of 'x'" in message


def test_it_may_be_nan_where_pixels_are_subtracted_before_sums(step_of, fake, check_fake):
    """As Winograd's tiles do; README promises no more of them."""

    class Subtracting(fake):
        subtracts_pixels = True

    check_fake(step_of(hidden), Subtracting(subtracting))
    message = caught(check_fake, step_of(hidden), Subtracting(spread))
    assert "where the reference is finite" in message


def spread(step, frame):
    """To the other image."""
    subtracting(step, frame)
    output(step, frame).add_(frame.values["x"].sum() * 0)
