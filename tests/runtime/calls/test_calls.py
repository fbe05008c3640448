"""How a tuned module is called: what counts as the same call, and what becomes of another one."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import plantune
from plantune import UnplannedCall, optimize
from plantune.errors import InputMismatch
from plantune.plans.guess import framework_plan
from plantune.space.search_space import load_search_space


class Gated(nn.Module):
    """Two tensors, one of which may be missing, and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(
        self, x: Tensor, gate: Tensor | None = None, scale: float = 1.0, *, squared: bool = False
    ) -> tuple[Tensor, dict[str, Any]]:
        y = self.linear(x) * scale
        y = y if gate is None else y * gate
        return (y * y if squared else y), {"gate": gate is not None, "scale": scale, "none": None}


@pytest.fixture
def module():
    return Gated().eval()


@pytest.fixture
def x():
    return torch.randn(2, 4)


@pytest.fixture
def gate():
    return torch.randn(2, 3)


def planned(module, *args, mode="infer", **kwargs):
    """From the default plan, as a program."""
    graph = optimize(module, *args, mode=mode, **kwargs).pool().graph
    plan = framework_plan(graph, load_search_space("cpu"), network="called")
    return optimize(module, *args, mode=mode, plan=plan, **kwargs)


def alike(ours, theirs):
    torch.testing.assert_close(ours[0], theirs[0])
    assert ours[1:] == theirs[1:]


SPELLINGS = {
    "by place": lambda model, x, gate: model(x, gate, 2.0),
    "by name": lambda model, x, gate: model(x, gate=gate, scale=2.0),
    "all by name, in another order": lambda model, x, gate: model(scale=2.0, gate=gate, x=x),
}


@pytest.mark.parametrize("call", SPELLINGS.values(), ids=SPELLINGS)
@pytest.mark.parametrize("example", SPELLINGS.values(), ids=SPELLINGS)
def test_arguments_by_place_and_by_name_are_the_same_call(example, call, module, x, gate):
    model = example(lambda *a, **k: planned(module, *a, **k), x, gate)
    for _ in range(2):
        x, gate = torch.randn_like(x), torch.randn_like(gate)
        alike(call(model, x, gate), call(module, x, gate))
        assert model.last_call().how == "planned"
    assert model.stats().instances == 1


OTHERS = {
    "another constant": lambda model, x, gate: model(x, gate, 3.0),
    "one that was left out": lambda model, x, gate: model(x, gate, 2.0, squared=True),
    "no second tensor": lambda model, x, gate: model(x, None, 2.0),
    "none of them": lambda model, x, gate: model(x),
}


@pytest.mark.parametrize("call", OTHERS.values(), ids=OTHERS)
def test_a_call_with_other_arguments_is_right(call, module, x, gate):
    model = planned(module, x, gate, 2.0)
    with pytest.warns(UnplannedCall, match="it was made for input"):
        alike(call(model, x, gate), call(module, x, gate))
    alike(model(x, gate, 2.0), module(x, gate, 2.0))
    assert model.last_call().how == "planned"


def test_constants_of_which_the_same_layers_follow_share_their_plan(module, x, gate):
    model = planned(module, x, gate, 2.0)
    alike(model(x, gate, 2), module(x, gate, 2))
    assert type(model(x, gate, 2)[1]["scale"]) is int
    assert model.last_call().how == "planned"
    assert model.stats().instances == 1


def test_zeros_of_both_signs_are_other_constants(module, x):
    model = planned(module, x, scale=0.0)
    with pytest.warns(UnplannedCall):
        assert torch.equal(model(x, scale=-0.0)[0].signbit(), module(x, scale=-0.0)[0].signbit())


def test_an_argument_that_is_anybodys_runs_in_the_framework(module, x):
    class Half(float):
        """May compute in its own way."""

    model = planned(module, x, scale=0.5)
    with pytest.warns(UnplannedCall, match="an argument is a Half"):
        alike(model(x, scale=Half(0.5)), module(x, scale=Half(0.5)))


def test_a_call_that_the_module_does_not_take_says_so(module, x, gate):
    model = planned(module, x, gate)
    for call in (lambda m: m(x, gate, gates=x), lambda m: m(), lambda m: m(x, gate, 1.0, True)):
        with pytest.raises(TypeError) as ours:
            call(model)
        with pytest.raises(TypeError) as theirs:
            call(module)
        assert str(ours.value) == str(theirs.value)


def test_a_second_tensor_of_another_kind(module, x, gate):
    model = planned(module, x, gate)
    with pytest.warns(UnplannedCall, match=r"got \(2, 4\), \(1, 3\)"):
        alike(model(x, gate[:1]), module(x, gate[:1]))
    with pytest.warns(UnplannedCall, match=r"\(2, 3\) float32, got .*\(2, 3\) float64"):
        alike(model(x, gate.double()), module(x, gate.double()))
    with pytest.raises(InputMismatch, match="float32 tensor"):
        model(x.double(), gate)


def test_one_tensor_in_both_places():
    model = planned(nn.Bilinear(3, 3, 2).eval(), *torch.randn(2, 2, 3))
    x = torch.randn(4, 3)[:2]
    torch.testing.assert_close(model(x, x), model.reference(x, x))
    assert model.last_call().how == "planned"


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True), (False, False)])
def test_gradients_of_each_input(wanted):
    module = nn.Bilinear(3, 4, 2)
    model = planned(module, torch.randn(5, 3), torch.randn(5, 4), mode="train")
    values = torch.randn(5, 3), torch.randn(5, 4)
    found = []
    for m in (model, module):
        given = [v.clone().requires_grad_(w) for v, w in zip(values, wanted, strict=True)]
        m(*given).square().sum().backward()
        found.append([*(g.grad for g in given), *(p.grad for p in m.parameters())])
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)


def test_copies_and_pickles_know_the_call(module, x, gate):
    model = planned(module, x, gate=gate)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        alike(other(x, gate), module(x, gate))
        assert other.last_call().how == "planned"


def test_check_takes_the_arguments_of_a_call(module, x, gate):
    model = planned(module, x, gate=gate)
    assert plantune.check(model, x, gate=gate).call.how == "planned"


def test_an_example_needs_a_tensor(module):
    for args in ((), (None, 1.0)):
        with pytest.raises(ValueError, match="at least one tensor"):
            optimize(module, *args)
    with pytest.raises(ValueError, match="at least one tensor; got ndarray, int"):
        optimize(module, np.zeros(3), 2)
    with pytest.raises(ValueError, match="mode is optimize's own, got a tensor"):
        optimize(module, mode=torch.zeros(3))


class Doubled(nn.Module):
    """What it does follows from an attribute; `traced` counts how often it was read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.twice = nn.Linear(4, 3), False

    def forward(self, x: Tensor) -> Tensor:
        traced.append(1) if x.untyped_storage().device.type == "meta" else None
        return self.linear(x) * (2 if self.twice else 1)


traced: list[int] = []


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_what_was_read_for_the_check_is_what_the_first_call_plans(x, mode):
    module = Doubled().train(mode == "train")
    traced.clear()
    model = optimize(module, x, mode=mode)
    torch.testing.assert_close(model(x), module(x))
    assert traced == [1]


@pytest.mark.parametrize("refreshed", [False, True])
def test_a_module_that_changed_before_the_first_call_is_read_again(x, refreshed):
    module = Doubled().eval()
    model = optimize(module, x)
    model.reference.twice = module.twice = True
    if refreshed:
        model.refresh()
    torch.testing.assert_close(model(x), module(x))
