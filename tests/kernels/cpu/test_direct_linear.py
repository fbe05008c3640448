"""Linear layers that read each weight once."""

from __future__ import annotations

import pytest

from plantune.base.canonical import Attrs
from plantune.kernels.families.direct_linear import FAMILY

pytestmark = pytest.mark.usefixtures("as_with_a_compiler")


def layer(rows, depth, outputs, *ends, weight_is_rows=True):
    def emit(b):
        x = b.x(rows, depth)
        if weight_is_rows:
            y = b.linear(x, b.w(outputs, depth))
        else:
            y = b("matmul", x, b.w(depth, outputs), transpose_a=False, transpose_b=False)
        for end in ends:
            y = b("add_channel", y, b.w(outputs), axis=1) if end == "bias" else b(end, y)
        return y

    return emit


STEPS = {
    "one row": layer(1, 40, 70, "bias", "relu"),
    "several rows": layer(7, 33, 64, "bias"),
    "a weight of columns": layer(5, 20, 65, weight_is_rows=False),
    "one of all": layer(1, 1, 1),
    "more rows than a chunk has": layer(150, 16, 31, "bias", "relu"),
    "the first one of AlexNet": layer(3, 9216, 48, "bias", "relu"),
    "the first one of VGG": layer(2, 25088, 40, "bias"),
}


@pytest.mark.parametrize("name", STEPS)
def test_it_is_right(step_of, require_right, name):
    require_right(step_of(STEPS[name]), "direct_linear")


REFUSED = {
    "an input of columns": (
        lambda b: b("matmul", b.x(8, 3), b.w(8, 5), transpose_a=True, transpose_b=False),
        "reads the left matrix by rows",
    ),
    "what is computed": (lambda b: b.linear(b.x(3, 8), b.x(5, 8)), "is no weight"),
    "a bias that is computed": (
        lambda b: b("add_channel", b.linear(b.x(3, 8), b.w(5, 8)), b.x(5), axis=1),
        "bias is no weight",
    ),
    "nothing": (layer(0, 8, 5), "nothing to compute"),
    "a convolution": (lambda b: b.conv(b.x(1, 8, 2, 2), b.w(5, 8, 1, 1)), "only a matrix product"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_run(step_of, refusal, name):
    emit, reason = REFUSED[name]
    assert reason in refusal(step_of(emit), "direct_linear")


def test_other_dtypes_are_refused(step_of, refusal):
    reason = refusal(step_of(STEPS["one row"], "bfloat16"), "direct_linear")
    assert reason == "it is written for float32, got bfloat16"


@pytest.mark.parametrize(("depth", "outputs", "guessed"), [(16, 32, True), (8, 64, False)])
def test_a_guess_leaves_small_layers_to_others(step_of, depth, outputs, guessed):
    parts = FAMILY.parts(step_of(layer(4, depth, outputs)))
    assert FAMILY.can_be_guessed(parts, Attrs()) == guessed
