"""Which steps squeeze-and-excite covers on a CPU, and its numbers at the ends of floats."""

from __future__ import annotations

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.kernels.family import Candidate, Frame
from plantune.kernels.registry import family_named
from plantune.measure.inputs import draw_inputs
from plantune.measure.numerics import check

CONFIG = Attrs({"layout": "nchw"})
pytestmark = pytest.mark.usefixtures("as_with_a_compiler")


def gates(b, x, channels, hidden, *, bias=True):
    y = b("mean", x, dims=(2, 3), keepdim=False)
    for rows, columns, op in ((hidden, channels, "relu"), (channels, hidden, "sigmoid")):
        y = b.linear(y, b.w(rows, columns))
        y = b(op, b("add_channel", y, b.w(rows), axis=1) if bias else y)
    return y


def tail(shape=(3, 35, 3, 5), hidden=7, *, bias=True, residual=True, relu=True, offset=True):
    def emit(b):
        x = b.x(*shape)
        gate = gates(b, x, shape[1], hidden, bias=bias)
        y = b("mul", x, b("reshape", gate, shape=(*shape[:2], 1, 1)))
        y = b("add", y, b.x(*shape)) if residual else y
        y = b("relu", y) if relu else y
        return b("add", y, b.w(1)) if offset else y

    return emit


def candidate(layout):
    return Candidate("squeeze_excite", Attrs({"layout": layout}))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize(
    "emit",
    [
        tail(),
        tail((1, 64, 16, 16), 4),
        tail((2, 33, 1, 1), 1, bias=False),
        tail((5, 1, 2, 2), 3, residual=False),
        tail((2, 40, 7, 9), 17, relu=False),
        tail((2, 32, 4, 4), 2, offset=False),
        tail((1, 16, 4, 4), 2, bias=False, residual=False, relu=False, offset=False),
    ],
)
def test_it_is_right_with_and_without_each_part(step_of, space, emit, layout):
    for seed in (0, 1):
        report = check(step_of(emit), candidate(layout), space, seed)
        assert report.error <= report.bound
        assert report.deterministic


@pytest.mark.parametrize("value", [1e4, -1e4, 3e38, -3e38, float("inf"), float("nan")])
def test_gates_at_the_ends_of_floats(step_of, space, value):
    step = step_of(tail((2, 16, 2, 2), 2, residual=False, relu=False, offset=False))
    data = draw_inputs(step, torch.Generator().manual_seed(0))
    image = next(name for name, type_ in step.inputs if len(type_.shape) == 4)
    data[image][0, 3] = value
    (output,) = (name for name, _ in step.outputs)
    values = {**data, output: torch.full_like(data[image], float("nan"))}
    family = family_named("squeeze_excite")
    size = family.workspace_bytes(family.parts(step), CONFIG)
    built = family.build(family.parts(step), CONFIG, space.arch)
    binding = family.bind(
        family.parts(step), CONFIG, Frame(values, torch.empty(size, dtype=torch.uint8), built)
    )
    binding.refresh()
    binding.launch(0)
    torch.testing.assert_close(values[output], step.evaluate(data)[output], equal_nan=True)


@pytest.mark.parametrize(
    ("emit", "reason"),
    [
        (lambda b: gates(b, b.x(2, 8, 3, 3), 8, 2), "the gates are the end of the step"),
        (lambda b: b("relu", b.x(2, 8, 3, 3)), "not by mean"),
    ],
)
def test_it_says_what_it_does_not_cover(step_of, refusal, emit, reason):
    assert reason in refusal(step_of(emit), "squeeze_excite", layout="nhwc")


def test_a_value_inside_that_is_read_outside(step_of, refusal):
    def emit(b):
        x = b.x(2, 8, 3, 3)
        gate = gates(b, x, 8, 2)
        return gate, b("mul", x, b("reshape", gate, shape=(2, 8, 1, 1)))

    assert "read outside" in refusal(step_of(emit), "squeeze_excite", layout="nhwc")


def test_other_dtypes_are_refused(step_of, refusal):
    reason = refusal(step_of(tail(), "bfloat16"), "squeeze_excite", layout="nchw")
    assert reason == "it is written for float32"


def test_without_a_compiler(step_of, refusal, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("CXX", "/no/such/compiler")
    reason = refusal(step_of(tail()), "squeeze_excite", layout="nhwc")
    assert "no C++ compiler was found" in reason
