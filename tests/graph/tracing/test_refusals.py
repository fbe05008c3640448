"""What extraction does not know is refused: the message names the place and what to do."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import cached_property
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from plantune.errors import UnsupportedModule
from plantune.graph.tracing.arguments import Arguments
from plantune.graph.tracing.extract import extract
from plantune.graph.tracing.trace import trace
from plantune.graph.types import TensorType

IMAGE = TensorType((2, 4, 6, 6))
DOOR = r'torch\.compile\(module, backend="plantune"\) cuts round it: take that'
TO_DO = rf"cannot be part of a plan\. {DOOR}, or write it in another way"


def under_autocast(m: Any, x: Tensor) -> Tensor:
    was = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)  # of another kind of device than the module's
    try:
        return F.conv2d(x, m.four)
    finally:
        torch.set_autocast_enabled("cuda", was)


def written_without_gradients(m: Any, x: Tensor) -> Tensor:
    y = x * m.four.sum()
    with torch.no_grad():
        y.mul_(2.0)
    return y


def part_written_without_gradients(m: Any, x: Tensor) -> Tensor:
    y = x * m.four.sum()
    with torch.no_grad():
        y[0].mul_(2.0)
    return y


def unknown_part_of_a_buffer(m: Any, x: Tensor) -> Tensor:
    m.mean.as_strided((2,), (1,)).mul_(2.0)
    return x * m.mean[0]


FORWARDS: list[tuple[Callable[[Any, Tensor], Any], str]] = [
    (lambda m, x: x.half().mul_(x), "an in-place op whose result has another type"),
    (lambda m, x: x.to(torch.float8_e5m2), "float8_e5m2 is not one of"),
    (lambda m, x: torch.fft.fft(x).real, "complex64 is not one of"),
    (lambda m, x: x.bernoulli_(0.5), "an in-place op on the input, which belongs to the caller,"),
    (lambda m, x: F.instance_norm(x.half(), m.mean, m.var), "which moves statistics in this form,"),
    (
        lambda m, x: x + torch.tensor([1.0] * 65)[0],
        r"a constant tensor \(register it as a buffer\)",
    ),
    (lambda m, x: x + m.plain, "a constant tensor"),
    (under_autocast, "a forward under autocast"),
    (written_without_gradients, "an in-place op under no_grad on what has a gradient"),
    (part_written_without_gradients, "under no_grad on a part of what has a gradient"),
    (unknown_part_of_a_buffer, "of which a view is used later"),
    (lambda m, x: x * m.four[0].mul_(2.0).sum(), "an in-place op on a parameter"),
    (lambda m, x: F.conv2d(x.half(), m.four), "dtypes differ: float16 and float32"),
    (lambda m, x: torch.add(x, x, out=x), "an in-place op on the input"),
    (lambda m, x: torch.rand(6, out=x[0, 0, 0] * 2.0), r"in-place op aten\.rand\.out"),
]

UNTRACED: list[tuple[Callable[[Any, Tensor], Any], str]] = [
    (lambda m, x: x if x.sum() > 0 else -x, "asks for a tensor's values"),
    (lambda m, x: x * float(x.sum()), "asks for a tensor's values"),
    (lambda m, x: x[x > 0], "asks for a tensor's values"),
    (lambda m, x: x.nonzero(), "asks for a tensor's values"),
]

UNFIT: list[tuple[Callable[[Any, Tensor], Any], str]] = [
    (lambda m, x: x.view(7, 7), r"shape '\[7, 7\]' is invalid"),
    (lambda m, x: x + x.view(4, 2, 6, 6), "Attempting to broadcast"),
    (lambda m, x: x.transpose(0, 7), "Dimension out of range"),
    (lambda m, x: pack_padded_sequence(x, [6, 4]).data, "it packs sequences, whose sizes are"),
    (lambda m, x: F.conv2d(x, m.kernel), "channel"),
    (lambda m, x: F.linear(x, m.weight), "must have same reduction dim"),
]


def nested(calls: Any, module: nn.Module) -> nn.Module:
    """The module at layers.1.act, after layers that are known."""
    layers = nn.ModuleList([nn.Identity(), nn.ModuleDict({"act": module})])
    return calls(lambda m, x: m.layers[1]["act"](m.layers[0](x)), layers=layers)


def rich(calls: Any, forward: Any) -> Any:
    inner = calls(
        forward,
        mean=torch.zeros(4),
        var=torch.ones(4),
        kernel=nn.Parameter(torch.ones(2, 3, 1, 1)),
        four=nn.Parameter(torch.ones(2, 4, 1, 1)),
        weight=nn.Parameter(torch.ones(5, 5)),
    )
    inner.plain = torch.ones(6)
    return nested(calls, inner)


@pytest.mark.parametrize(("forward", "message"), FORWARDS)
def test_a_call_inside_of_a_module(forward: Any, message: str, calls: Any) -> None:
    place = r"layers\.1\.act(\.\w+)?"
    with pytest.raises(UnsupportedModule, match=rf"Calls, at {place}: .*{message}.* {TO_DO}"):
        extract(rich(calls, forward), IMAGE)


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scripting is deprecated
        return torch.jit.script(nn.ReLU())  # type: ignore[no-any-return]


def hooked() -> nn.Module:
    layer = nn.ReLU()
    layer.register_forward_hook(lambda module, args, result: result * 2.0)
    return layer


@pytest.mark.parametrize(
    ("layer", "what"), [(hooked, "a module with forward hooks"), (scripted, "a scripted module")]
)
def test_a_module_that_runs_what_no_trace_sees(layer: Any, what: str, calls: Any) -> None:
    with pytest.raises(UnsupportedModule, match=rf"Calls, at layers\.1\.act: {what}"):
        extract(nested(calls, layer()), IMAGE)


def test_an_error_of_the_callers_own_names_the_call() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5))
    with pytest.raises(UnsupportedModule) as caught:
        extract(network, TensorType((2, 3, 9, 9), "float32"))
    assert re.search(
        r"Sequential, at 2: .* in the call \(\(2, 3, 9, 9\) float32\): RuntimeError: .*"
        r"If the module itself raises this too, the call is wrong; else torch\.compile",
        str(caught.value),
    )


def test_nested_tensors_are_said_to_be_avoidable() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    arguments = Arguments(
        (TensorType((3, 7, 8)),), {"src_key_padding_mask": TensorType((3, 7), "bool")}
    )
    with pytest.raises(UnsupportedModule, match="with enable_nested_tensor=False"):
        trace(nn.TransformerEncoder(layer, 2).eval(), arguments)
    apart = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    assert trace(apart, arguments).records


class Unlisted(nn.Module):
    """Has layers where torch does not see them, and a value that is computed when it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = {"first": [nn.Linear(6, 6)]}
        self.forwards: Any = None

    @cached_property
    def scale(self) -> float:
        return 3.0

    def forward(self, x: Tensor) -> Tensor:
        return self.forwards(self, x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (
            lambda m, x: m.layers["first"][0](x),
            r"a parameter that parameters\(\) does not list \(keep modules in an "
            r"nn\.ModuleList; .* share=True\), self\.layers\['first'\]\[0\]\.weight, cannot be",
        ),
        (lambda m, x: x * m.scale, r"self\.scale, a cached property that was not read before,"),
        (lambda m, x: (x * 2.0).t_(), r"aten\.t_\.default, an in-place op whose result"),
    ],
)
def test_what_is_refused_is_named_as_the_user_wrote_it(forward: Any, message: str) -> None:
    module = Unlisted()
    module.forwards = forward
    with pytest.raises(UnsupportedModule, match=message):
        extract(module, TensorType((2, 6), "float32"))


@pytest.mark.parametrize(("forward", "message"), [*UNTRACED, *UNFIT])
def test_what_torch_cannot_trace(forward: Any, message: str, calls: Any) -> None:
    with pytest.raises(UnsupportedModule) as caught:
        extract(rich(calls, forward), IMAGE)
    assert re.search(r"Calls, at layers\.1\.act(\.\w+)?: torch cannot trace it", str(caught.value))
    assert re.search(rf"{message}.*(\. |; else ){DOOR}; ", str(caught.value))
    assert ("must not branch or loop on them" in str(caught.value)) == (
        (forward, message) in UNTRACED
    )


def test_a_call_of_the_modules_own_forward(calls: Any) -> None:
    with pytest.raises(UnsupportedModule, match=r"Calls, at its own forward: a constant tensor"):
        extract(calls(lambda m, x: x + torch.tensor([6.0] * 99).sum()), IMAGE)


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
    with pytest.raises(UnsupportedModule, match=r"a tensor's value as a number|a constant tensor"):
        extract(module, IMAGE)


def test_a_message_names_the_line(calls: Any) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return x + torch.tensor([1.0] * 99).sum()

    def branches(m: Any, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x

    for function in (forward, branches):
        line = f"{__file__}:{function.__code__.co_firstlineno + 1}"
        with pytest.raises(UnsupportedModule) as caught:
            extract(nested(calls, calls(function)), IMAGE)
        assert str(caught.value).endswith(line)


def test_the_input_gives_way_to_a_parameter_of_its_name(calls: Any) -> None:
    graphs = [
        extract(calls(forward, **{name: nn.Parameter(torch.ones(3))}), TensorType((2, 3)))
        for name, forward in {"x": lambda m, a: a * m.x, "y": lambda m, a: a * m.y}.items()
    ]
    assert [graph.inputs[0][0] for graph in graphs] == ["x_", "x"]
    assert graphs[0].digest == graphs[1].digest


def assigns(m: Any, x: Tensor) -> Tensor:
    m.seen = torch.relu(x)
    return m.seen


def counts(m: Any, x: Tensor) -> Tensor:
    m.calls_so_far += 1
    return x


def replaces(m: Any, x: Tensor) -> Tensor:
    m.count = m.count + 1
    return x


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (assigns, r"assigns to self.seen .*, or write into a buffer, self\.seen\.copy_\("),
        (counts, "assigns to self.calls_so_far .*, or write it in another way"),
        (replaces, "assigns to self.count"),
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
