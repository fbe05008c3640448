"""What stands in front of an image's first op: how it is read, and the numbers that it makes."""

from __future__ import annotations

import pytest
import torch

from plantune.errors import IllegalCandidate
from plantune.graph.types import TensorType
from plantune.kernels.family import Frame
from plantune.kernels.patterns.channel_affine import ChannelScales, channel_affine_of

SHAPE = (2, 3, 4, 5)


def bytes_of(b):
    return b.graph.input("x0", TensorType(SHAPE, "uint8"))


def normalised(b):
    y = b("affine", b("cast", bytes_of(b), dtype=b.dtype), alpha=0.25, beta=-3.0)
    return b("div", b("sub", y, b.w(3, 1, 1)), b.w(1, 3, 1, 1))


def by_channel(b):
    y = b("add_channel", b("mul_channel", b.x(*SHAPE), b.w(3), axis=1), b.w(3), axis=1)
    return b("mul", b("add", y, b.w(1)), b.w())


def two_casts(b):
    y = b("affine", b("cast", bytes_of(b), dtype="float32"), alpha=-1.5, beta=0.5)
    return b("add", b("cast", y, dtype=b.dtype), b.w(1, 1, 1, 1))


CASES = {f.__name__: f for f in (normalised, by_channel, two_casts)}


@pytest.mark.parametrize("emit", CASES.values(), ids=CASES)
def test_scales_and_shifts_compute_what_the_nodes_do(step_of, emit):
    step = step_of(emit, "float64")
    affine = channel_affine_of(step)
    assert affine.nodes == step.nodes
    assert (affine.source, affine.result) == ("x0", step.outputs[0][0])
    assert affine.scales
    values = {
        name: torch.rand(type_.shape, dtype=type_.torch_dtype) + 0.5
        if type_.is_float
        else torch.randint(256, type_.shape, dtype=type_.torch_dtype)
        for name, type_ in step.inputs
    }
    table = ChannelScales(affine, 3, Frame(values))
    for _ in range(2):  # a second time, as when weights have changed
        for constant in table.constants:
            constant.fill()
    scale, shift = table.tensor.view(3, 2, 1, 1).unbind(1)
    expected = step.evaluate(values, torch.float64)[affine.result]
    got = values["x0"].double() * scale + shift
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


def test_scales_of_numbers_alone_are_there_at_once(step_of):
    def emit(b):
        return b("affine", b("cast", bytes_of(b), dtype=b.dtype), alpha=0.25, beta=-3.0)

    table = ChannelScales(channel_affine_of(step_of(emit)), 3, Frame({}))
    assert table.constants == ()
    assert torch.equal(table.tensor, torch.tensor([0.25, -3.0]).expand(3, 2))


def test_a_cast_alone_scales_nothing(step_of):
    affine = channel_affine_of(step_of(lambda b: b("cast", bytes_of(b), dtype=b.dtype)))
    assert not affine.scales
    assert [node.op for node in affine.nodes] == ["cast"]


def test_it_ends_where_something_else_begins(step_of):
    affine = channel_affine_of(
        step_of(lambda b: b("affine", b("relu", b.x(*SHAPE)), alpha=2, beta=0))
    )
    assert (affine.nodes, affine.source, affine.result) == ((), "x0", "x0")
    assert not affine.scales


@pytest.mark.parametrize(
    ("emit", "reason"),
    [
        (
            lambda b: b("affine", bytes_of(b), alpha=2, beta=0),
            "computes in uint8, not a float type",
        ),
        (lambda b: b("mul", b.x(*SHAPE), b.x(*SHAPE)), "not one constant for each channel"),
        (lambda b: b("add", b.x(*SHAPE), b.x(3, 1, 1)), "not one constant for each channel"),
        (lambda b: b("add", b.x(*SHAPE), b.w(*SHAPE)), "not one constant for each channel"),
        (lambda b: b("add", b.x(*SHAPE), b.w(5)), "not one constant for each channel"),
        (lambda b: b("add", b.x(*SHAPE), b.w(2, 1, 1, 1)), "not one constant for each channel"),
        (lambda b: b("mul_channel", b.x(*SHAPE), b.w(4), axis=2), "not one constant for each"),
        (lambda b: b("affine", b.x(4, 5), alpha=2, beta=0), "on each channel of an image"),
        (lambda b: b("mul", *[b.x(*SHAPE)] * 2), "not one constant for each channel"),
        (
            lambda b: (x := b.x(*SHAPE), b("sub", b.w(*SHAPE), b("affine", x, alpha=2.0, beta=0)))[
                1
            ],
            "does not read",
        ),
    ],
)
def test_what_it_does_not_read_has_a_reason(step_of, emit, reason):
    with pytest.raises(IllegalCandidate, match=reason):
        channel_affine_of(step_of(emit))
