"""A module from its tape computes what the module does, and has its layers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plantune.base.jsonable import from_json, to_json
from plantune.errors import UnsupportedModule
from plantune.graph.tracing.arguments import Arguments
from plantune.graph.tracing.extract import extract
from plantune.graph.tracing.tape import Tape, packed, tape_of, unpacked
from plantune.graph.types import TensorType
from plantune.measure.subject import rebuilt
from plantune.models.se_resnet9 import SEResNet9Fixup

CPU = torch.device("cpu")
TYPES = (TensorType((2, 3, 8, 8)), TensorType((2, 3), "int64"))


class Mixed(nn.Module):
    """In-place writes, views, lists of results, constants made in the forward, two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.words, self.lstm = nn.Embedding(11, 8), nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 4)
        self.register_buffer("places", torch.arange(3))

    def forward(self, x: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        a, b = self.norm(self.conv(x)).chunk(2, 1)
        y = torch.cat([b, a], 1)
        y += torch.ones(8, 1, 1)
        y.mul_(2)
        said, (last, _) = self.lstm(self.words(tokens + self.places))
        return {"policy": self.head(F.gelu(y.mean((2, 3))) + said[:, 0]), "last": last}


def taped(module: nn.Module, types: tuple[TensorType, ...]) -> Tape:
    """As another process gets it."""
    return from_json(Tape, json.loads(json.dumps(to_json(tape_of(module, Arguments(types))))))


@pytest.mark.parametrize("trains", [False, True])
def test_it_computes_the_same_and_has_the_same_layers(trains: bool) -> None:
    module = Mixed().train(trains)
    again = rebuilt(taped(module, TYPES), CPU).train(trains)
    assert again.state_dict().keys() == module.state_dict().keys()
    again.load_state_dict(module.state_dict())
    assert extract(again, *TYPES, fold=False).digest == extract(module, *TYPES, fold=False).digest
    inputs = torch.randn(2, 3, 8, 8), torch.randint(0, 8, (2, 3))
    wanted, got = module(*inputs), again(*inputs)
    torch.testing.assert_close(list(got), list(wanted.values()), rtol=0, atol=0)
    torch.testing.assert_close(dict(again.named_buffers()), dict(module.named_buffers()))
    if trains:
        wanted["policy"].sum().backward()
        got[0].sum().backward()
        gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        assert {n for n, p in again.named_parameters() if p.grad is not None} == set(gradients)
        for name, gradient in gradients.items():
            torch.testing.assert_close(again.get_parameter(name).grad, gradient)


class Target(nn.Module):
    """Learns from its own output, through which no gradient goes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        with torch.no_grad():
            wanted = self.layer(y)
        return y * wanted


@pytest.mark.parametrize("trains", [True, False])
def test_no_gradient_goes_where_none_went(trains: bool) -> None:
    """A search ran what the tape says with gradients everywhere, and refused its own plan."""
    module, type_ = Target().train(trains), TensorType((2, 3))
    arguments = Arguments((type_,))
    again = rebuilt(tape_of(module, arguments, derives=True), CPU).train()
    again.load_state_dict(module.state_dict())
    layers = [extract(each, type_, fold=False, derives=True) for each in (module, again)]
    assert layers[0].digest == layers[1].digest
    x = torch.randn(2, 3)
    for each in (module, again):
        each(x).sum().backward()
    torch.testing.assert_close(again.layer.weight.grad, module.layer.weight.grad)
    silent = [call.silent for call in tape_of(module, arguments, derives=False).calls]
    assert not any(silent)  # in inference nothing is to switch gradients on


def test_buffers_come_with_their_values_and_large_ones_without() -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("small", torch.tensor([1.5, -2.0]).bfloat16())
            self.register_buffer("large", torch.zeros(1 << 19))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.small.float() + self.large[:2]

    made = rebuilt(taped(Held(), (TensorType((2,)),)), CPU)
    assert made.small.tolist() == [1.5, -2.0]
    assert made.large.unique().tolist() == [1.0]  # no number by which anything could be divided


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "uint8", "bool"])
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4)])
def test_values_pack_exactly(dtype: str, shape: tuple[int, ...]) -> None:
    type_ = TensorType(shape, dtype)
    tensor = torch.randint(0, 2, shape).to(type_.torch_dtype)
    text = packed(tensor)
    assert text is not None
    assert torch.equal(unpacked(text, type_), tensor)


def test_which_parameters_train_is_kept() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].requires_grad_(False)
    made = rebuilt(taped(module, (TensorType((1, 2)),)), CPU)
    trained = {name for name, p in made.named_parameters() if p.requires_grad}
    assert trained == {"1.weight", "1.bias"}


def test_in_other_floats_it_converts_to_no_less() -> None:
    class Pixels(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float() / 3

    module = rebuilt(taped(Pixels(), (TensorType((1,), "uint8"),)), CPU, torch.float64)
    assert module(torch.ones(1, dtype=torch.uint8)).item() == 1 / 3


@pytest.mark.parametrize(
    ("train", "draws"), [(True, True), (False, False)], ids=["training", "inference"]
)
def test_a_tape_knows_whether_it_draws(train: bool, draws: bool) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).train(train)
    assert taped(module, (TensorType((1, 2)),)).draws == draws


WAYS: dict[str, Callable[[nn.Module, Tensor], nn.Module]] = {
    "traced": lambda module, x: torch.jit.trace(module, x, check_trace=False),
    "copied": lambda module, x: copy.deepcopy(module),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore")
def test_the_frameworks_ways_take_it(way: str) -> None:
    type_ = TensorType((1, 3, 64, 64))
    module = rebuilt(taped(SEResNet9Fixup(3).eval(), (type_,)), CPU).eval()
    x = torch.randn(type_.shape)
    torch.testing.assert_close(WAYS[way](module, x)(x), module(x))


def test_an_op_that_only_this_process_has_is_refused() -> None:
    library = torch.library.Library("own_ops_of_a_test", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")

    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            twice: Tensor = torch.ops.own_ops_of_a_test.twice(x)
            return twice

    with pytest.raises(UnsupportedModule, match=r"own_ops_of_a_test.twice.*test_tape.py:\d+"):
        taped(Twice(), (TensorType((2,)),))
    library._destroy()
