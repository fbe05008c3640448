"""What extraction does not know is refused: the message names the place and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plantune.errors import UnsupportedModule
from plantune.graph.extract import extract
from plantune.graph.types import TensorType
from plantune.layers import SpaceToDepth

IMAGE = TensorType((2, 4, 6, 6))
TO_DO = r"is not known to plantune. Write it with known ops, or add it \(CONTRIBUTING, a new op\)"

MODULES: list[tuple[nn.Module, str]] = [
    (nn.GELU(), "module GELU"),
    (nn.GroupNorm(2, 4), "module GroupNorm"),
    (nn.Conv1d(4, 4, 1), "module Conv1d"),
    (nn.ConvTranspose2d(4, 4, 1), "module ConvTranspose2d"),
    (nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), "padding_mode='reflect'"),
    (nn.Conv2d(4, 4, 3, padding="same"), "padding='same'"),
    (nn.Conv2d(3, 4, 3), "module layers.1.act in this form .conv2d: 4 channels do not fit"),
    (nn.Conv2d(4, 4, 7), "image .6, 6. is smaller than kernel .7, 7."),
    (nn.Linear(5, 5), "inner sizes differ: 6 and 5"),
    (nn.BatchNorm2d(4, affine=False), "a batch norm without running statistics or without affine"),
    (nn.BatchNorm2d(4, track_running_stats=False), "a batch norm without running statistics"),
    (nn.BatchNorm2d(4, momentum=None), r"a batch norm with momentum=None \(a cumulative average\)"),
    (nn.AvgPool2d(2, ceil_mode=True), "an average pool with ceil_mode or divisor_override"),
    (nn.AvgPool2d(2, divisor_override=3), "an average pool with ceil_mode or divisor_override"),
    (nn.MaxPool2d(2, ceil_mode=True), "a max pool with ceil_mode, return_indices or dilation"),
    (nn.MaxPool2d(2, dilation=2), "a max pool with ceil_mode, return_indices or dilation"),
    (nn.MaxPool2d(2, return_indices=True), "a max pool with ceil_mode, return_indices"),
    (nn.AdaptiveAvgPool2d(2), "adaptive average pooling to 2; only to"),
    (nn.AdaptiveAvgPool2d((1, None)), r"adaptive average pooling to \(1, None\)"),
    (nn.Dropout(0.1), "dropout in training mode"),
    (SpaceToDepth(4), "6x6 does not divide into 4x4"),
]

FORWARDS: list[tuple[Callable[[Any, Tensor], Any], str]] = [
    (lambda m, x: torch.tanh(x), "function tanh"),
    (lambda m, x: F.gelu(x), "function gelu"),
    (lambda m, x: x @ x, "function matmul"),
    (lambda m, x: x[:, 0], "function getitem"),
    (lambda m, x: x**2, "function pow"),
    (lambda m, x: torch.cat([x, x]), "function cat"),
    (lambda m, x: x.exp(), "method exp"),
    (lambda m, x: x.expand(2, 4, 6, 6), "method expand"),
    (lambda m, x: x.T + 1.0, "attribute 'T' of a tensor"),
    (lambda m, x: x.to(x.device), "attribute 'device' of a tensor"),
    (lambda m, x: x.to("cpu"), "a move to 'cpu'"),
    (lambda m, x: x.to("cpu", torch.float16), "method to in this form"),
    (lambda m, x: x.to(torch.float16, copy=True), "method to in this form .*'copy'"),
    (lambda m, x: x.to(torch.int64), r"a cast to torch\.int64"),
    (lambda m, x: x.to(torch.float8_e5m2), "method to in this form .*float8_e5m2 is not one of"),
    (lambda m, x: x.type("torch.HalfTensor"), "a cast to 'torch.HalfTensor'"),
    (lambda m, x: x.type(), "method type in this form"),
    (lambda m, x: x.long(), "method long"),
    (lambda m, x: x.half().mul_(x), "an in-place op whose result has another dtype"),
    (lambda m, x: 1 / x, "a number divided by a tensor"),
    (lambda m, x: torch.add(x, x, alpha=2), "an addition with alpha"),
    (lambda m, x: torch.sub(x, x, alpha=2), "function sub in this form .*alpha"),
    (lambda m, x: torch.div(x, 2, rounding_mode="floor"), "function div in this form"),
    (lambda m, x: torch.mean(x, 1, dtype=torch.float64), "function mean in this form"),
    (lambda m, x: x.mean(4 - 4 * x.dim()).view(7, 7), "reshape: .* does not reshape to"),
    (lambda m, x: x.sum().sum(0), "method sum in this form"),
    (lambda m, x: x.sum().flatten(), "method flatten in this form"),
    (lambda m, x: x.transpose(0, 7), "method transpose in this form"),
    (lambda m, x: x + x.view(4, 2, 6, 6), r"arithmetic on shapes \(2, 4.*, which do not fit"),
    (lambda m, x: x + torch.ones(x.size(0)), "function add in this form"),
    (lambda m, x: F.dropout(x), "dropout in training mode"),
    (lambda m, x: F.dropout(x, 0.2, m.training), "dropout in training mode"),
    (lambda m, x: x + torch.ones(6), r"a constant tensor \(register it as a buffer\)"),
    (lambda m, x: x + m.plain, "a constant tensor"),
    (lambda m, x: m.embedding(x), "module Embedding"),
    (lambda m, x: m.hooked(x), "a module with forward hooks"),
]

UNTRACED: list[tuple[Callable[[Any, Tensor], Any], str]] = [
    (lambda m, x: x if x.sum() > 0 else -x, "cannot be used as inputs to control flow"),
    (lambda m, x: x * float(x.sum()), "trace it"),
    (lambda m, x: sum(x), "trace it"),
    (lambda m, x: [x for _ in range(x.size(0))], "trace it"),
]


def nested(calls: Any, module: nn.Module) -> nn.Module:
    """The module at layers.1.act, behind layers that are known."""
    layers = nn.ModuleList([nn.Identity(), nn.ModuleDict({"act": module})])
    return calls(lambda m, x: m.layers[1]["act"](m.layers[0](x)), layers=layers)


@pytest.mark.parametrize(("module", "message"), MODULES, ids=lambda v: v if v is str else None)
def test_a_module(module: nn.Module, message: str, calls: Any) -> None:
    with pytest.raises(
        UnsupportedModule, match=rf"Calls, at layers\.1\.act: .*{message}.* {TO_DO}"
    ):
        extract(nested(calls, module), IMAGE)


def rich(calls: Any, forward: Any) -> Any:
    inner = calls(forward, embedding=nn.Embedding(2, 2), hooked=nn.ReLU())
    inner.plain = torch.ones(6)
    inner.hooked.register_forward_hook(lambda module, args, result: result * 2.0)
    return nested(calls, inner)


@pytest.mark.parametrize(("forward", "message"), FORWARDS)
def test_a_call_inside_of_a_module(forward: Any, message: str, calls: Any) -> None:
    place = r"layers\.1\.act(\.\w+)?"
    with pytest.raises(UnsupportedModule, match=rf"Calls, at {place}: .*{message}.* {TO_DO}"):
        extract(rich(calls, forward), IMAGE)


@pytest.mark.parametrize(("forward", "message"), UNTRACED)
def test_control_flow_on_values(forward: Any, message: str, calls: Any) -> None:
    with pytest.raises(UnsupportedModule) as caught:
        extract(rich(calls, forward), IMAGE)
    assert "Calls, at layers.1.act: torch.fx cannot trace it" in str(caught.value)
    assert message in str(caught.value)
    assert "must not branch or loop on the values of tensors" in str(caught.value)


def test_a_call_of_the_modules_own_forward(calls: Any) -> None:
    with pytest.raises(UnsupportedModule, match="Calls, at its own forward: function tanh"):
        extract(calls(lambda m, x: torch.tanh(x)), IMAGE)


def test_a_subclass_is_read_by_its_own_forward(calls: Any, extracts: Any) -> None:
    class Twice(nn.ReLU):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2.0

    extracts(nested(calls, Twice()), torch.randn(2, 3))


class Pair:
    def __init__(self, x: Tensor) -> None:
        self.x = x


def test_an_output_in_an_unknown_container(calls: Any) -> None:
    with pytest.raises(UnsupportedModule, match="Calls returns a Pair; tensors are known, and"):
        extract(calls(lambda m, x: Pair(x)), IMAGE)


@pytest.mark.parametrize("forward", [lambda m, x: None, lambda m, x: (x.shape, 3), lambda m, x: []])
def test_a_module_that_returns_no_tensor(forward: Any, calls: Any) -> None:
    with pytest.raises(UnsupportedModule, match="Calls returns no tensor"):
        extract(calls(forward), IMAGE)


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.item(),
        float,
        lambda t: t.view(1).tolist()[0],
        lambda t: 2.0 if t > 0 else 1.0,
        lambda t: float(t * 2),
    ],
)
def test_a_number_read_from_a_tensor_attribute(read: Any, calls: Any) -> None:
    """Nothing would see it change."""
    module = calls(lambda m, x: x * read(m.gain))
    module.gain = torch.tensor(2.0)
    with pytest.raises(UnsupportedModule, match="a tensor's value as a number"):
        extract(module, IMAGE)


def test_a_message_names_the_line(calls: Any) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def branches(m: Any, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x

    for function in (forward, branches):
        line = f"{__file__}:{function.__code__.co_firstlineno + 1}"
        with pytest.raises(UnsupportedModule) as caught:
            extract(nested(calls, calls(function)), IMAGE)
        assert str(caught.value).endswith(line)


@pytest.mark.parametrize("forward", [lambda m, x: x.mul_(2.0), lambda m, x: (x * 2).div_(2)])
def test_integers_that_torch_would_not_write_back(forward: Any, calls: Any) -> None:
    with pytest.raises(UnsupportedModule, match="in-place op"):
        extract(calls(forward), TensorType((2, 3), "uint8"))


def test_a_dtype_that_does_not_fit_the_weights(calls: Any) -> None:
    with pytest.raises(UnsupportedModule, match=r"at 0: .*dtypes differ: float16 and float32"):
        extract(nn.Sequential(nn.Conv2d(4, 4, 1)), TensorType((2, 4, 6, 6), "float16"))


def test_a_parameter_with_the_inputs_name(calls: Any) -> None:
    module = calls(lambda m, a: a * m.x, x=nn.Parameter(torch.ones(3)))
    with pytest.raises(
        UnsupportedModule, match="called 'x', the name of the graph's input: rename"
    ):
        extract(module, TensorType((2, 3)))


def assigns(m: Any, x: Tensor) -> Tensor:
    m.seen = torch.relu(x)
    return m.seen


def counts(m: Any, x: Tensor) -> Tensor:
    m.calls_so_far += 1
    return x


def moves(m: Any, x: Tensor) -> Tensor:
    m.count += 1
    return x


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (assigns, "assigns to self.seen"),
        (counts, "assigns to self.calls_so_far"),
        (moves, "assigns to self.count"),
    ],
)
def test_a_forward_that_changes_its_module_is_refused_and_leaves_no_trace(
    forward: Any, message: str, calls: Any
) -> None:
    module = calls(forward, count=torch.zeros(()), calls_so_far=5)
    before, held = dict(vars(module)), module.count
    with pytest.raises(UnsupportedModule, match=message):
        extract(module, IMAGE)
    assert vars(module) == before
    assert module.count is held
    assert module.count == 0
