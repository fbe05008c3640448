from __future__ import annotations

import pytest
import torch

from plantune.errors import IllegalCandidate
from plantune.kernels.cpu.folded import Folded
from plantune.kernels.patterns.epilogue import ConvEpilogue, conv_epilogue, usual_parts

IMAGE, WEIGHT = (2, 3, 6, 6), (4, 3, 3, 3)
MADE = (2, 4, 4, 4)


def conv(b):
    return b.conv(b.x(*IMAGE), b.w(*WEIGHT))


def test_a_convolution_alone(step_of):
    step = step_of(conv)
    assert conv_epilogue(step) == ConvEpilogue(step.nodes[0])


def test_all_parts(step_of):
    def emit(b):
        y = b("mul_channel", conv(b), b.w(4), axis=1)
        y = b("add", y, b.w(1))
        y = b("add", b.x(*MADE), y)
        return b("add", b("relu", y), b.w(1))

    step = step_of(emit)
    assert conv_epilogue(step) == ConvEpilogue(
        step.nodes[0], "w1", "w2", "x1", ("residual", "relu", "offset"), "w3"
    )


def test_without_relu_a_scalar_after_is_the_bias(step_of):
    step = step_of(lambda b: b("add", conv(b), b.w(1)))
    assert conv_epilogue(step) == ConvEpilogue(step.nodes[0], bias="w1")


PARTS = {
    "scale": lambda b, y: b("mul", y, b.w(1)),
    "channel scale": lambda b, y: b("mul_channel", y, b.w(4), axis=1),
    "bias": lambda b, y: b("add_channel", y, b.w(4), axis=1),
    "residual": lambda b, y: b("add", y, b.x(*MADE)),
    "relu": lambda b, y: b("relu", y),
    "sigmoid": lambda b, y: b("sigmoid", y),
    "offset": lambda b, y: b("add", y, b.w(1)),
}
WRONG_ORDERS = [
    ("bias", "scale"),
    ("bias", "bias"),
    ("scale", "channel scale"),
    ("offset", "bias"),
    ("offset", "offset"),
    ("residual", "bias"),
    ("residual", "scale"),
    ("residual", "offset"),
    ("residual", "residual"),
    ("relu", "scale"),
    ("relu", "bias"),
    ("relu", "residual", "residual"),
    ("relu", "residual", "bias"),
    ("relu", "offset", "offset"),
    ("relu", "offset", "relu"),
    ("relu", "offset", "residual"),
    ("relu", "offset", "channel scale"),
]


@pytest.mark.parametrize("order", WRONG_ORDERS, ids=" then ".join)
def test_a_wrong_order_is_refused(step_of, order):
    def emit(b):
        y = conv(b)
        for part in order:
            y = PARTS[part](b, y)
        return y

    step = step_of(emit)
    last = step.nodes[-1]
    with pytest.raises(IllegalCandidate, match=f"{last.op} at '{last.name}' has no place"):
        conv_epilogue(step)


RIGHT_ORDERS = [
    ("relu",),
    ("sigmoid", "offset"),
    ("relu", "residual"),
    ("relu", "residual", "sigmoid", "offset"),
    ("residual", "relu", "sigmoid"),
]


@pytest.mark.parametrize("order", RIGHT_ORDERS, ids=" then ".join)
def test_functions_and_the_residual_come_in_any_order(step_of, order):
    def emit(b):
        y = PARTS["bias"](b, conv(b))
        for part in order:
            y = PARTS[part](b, y)
        return y

    assert conv_epilogue(step_of(emit)).chain == order


@pytest.mark.parametrize("order", [("relu", "residual"), ("relu", "sigmoid")], ids=" then ".join)
def test_kernels_of_one_function_refuse_other_orders(step_of, order):
    step = step_of(lambda b: PARTS[order[1]](b, PARTS[order[0]](b, conv(b))))
    with pytest.raises(IllegalCandidate, match="only one function, after the residual"):
        usual_parts(step)


REFUSED = {
    "it starts with relu": (
        lambda b: b("relu", b.x(*IMAGE)),
        "the step starts with relu, not with a convolution",
    ),
    "an inner value leaves": (
        lambda b: (y := conv(b), b("relu", y)),
        "a value before the end of the step is read outside of it",
    ),
    "a node aside": (
        lambda b: (conv(b), b("relu", b.x(*MADE)))[1],
        "'relu' does not read 'conv2d', the value before it",
    ),
    "a scale that changes": (
        lambda b: b("mul", conv(b), b.x(1)),
        "the scale 'x1' is not constant between calls",
    ),
    "a bias that changes": (
        lambda b: b("add_channel", conv(b), b.x(4), axis=1),
        "the bias 'x1' is not constant between calls",
    ),
    "an offset that changes": (
        lambda b: b("add", b("relu", conv(b)), b.x(1)),
        "the offset 'x1' is not constant between calls",
    ),
    "a weight that changes": (
        lambda b: b.conv(b.x(*IMAGE), b.x(*WEIGHT)),
        "the weight 'x1' is not constant between calls",
    ),
    "a constant image": (
        lambda b: b.conv(b.w(*IMAGE), b.w(*WEIGHT)),
        "'w0' is constant, not an image that each call brings",
    ),
    "a constant residual": (
        lambda b: b("add", conv(b), b.w(*MADE)),
        "is constant, not an image that each call brings",
    ),
    "a bias per column": (
        lambda b: b("add_channel", conv(b), b.w(4), axis=3),
        "add_channel at 'add_channel' has no place",
    ),
    "a gate": (
        lambda b: b("mul", conv(b), b.x(2, 4, 1, 1)),
        "mul at 'mul' has no place",
    ),
    "a product of images": (
        lambda b: b("mul", conv(b), b.x(*MADE)),
        "mul at 'mul' has no place",
    ),
    "a residual that is broadcast": (
        lambda b: b("add", conv(b), b.x(4, 1, 1)),
        "add at 'add' has no place",
    ),
    "a convolution that is broadcast": (
        lambda b: b("add", b.x(*MADE), b.conv(b.x(2, 3, 3, 3), b.w(*WEIGHT))),
        "add at 'add' has no place",
    ),
    "itself": (
        lambda b: b("add", *[conv(b)] * 2),
        "add at 'add' has no place",
    ),
    "a difference": (
        lambda b: b("sub", conv(b), b.x(*MADE)),
        "sub at 'sub' has no place",
    ),
    "a number": (
        lambda b: b("affine", conv(b), alpha=2.0, beta=0.0),
        "affine at 'affine' has no place",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_an_epilogue_is_refused_with_the_reason(step_of, name):
    emit, reason = REFUSED[name]
    with pytest.raises(IllegalCandidate) as caught:
        conv_epilogue(step_of(emit))
    assert reason in str(caught.value)


@pytest.mark.parametrize("scalar", [(), (1,), (1, 1, 1, 1)])
def test_constants_fold_scalars_of_any_rank(step_of, scalar):
    def emit(b):
        y = b("add", b("mul", conv(b), b.w(*scalar)), b.w(*scalar))
        return b("add", b("relu", y), b.w(*scalar))

    step = step_of(emit)
    values = {name: torch.randn(type_.shape) for name, type_ in step.inputs}
    folded = Folded(conv_epilogue(step), values, lambda weight: weight)
    folded.refresh()
    folded.finish(y := torch.conv2d(values["x0"], folded.weight, folded.bias))
    expected = step.evaluate(values)[step.outputs[0][0]]
    torch.testing.assert_close(y, expected)
