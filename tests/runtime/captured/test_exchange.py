"""A backward pass in a capture hands its gradients to an exchange, as it makes them."""

from __future__ import annotations

import copy

import pytest
import torch

from plantune.runtime.captured.rehearsal import rehearsing
from plantune.runtime.program.exchange import exchanging

from .conftest import program_of

pytestmark = pytest.mark.usefixtures("captures")


class Exchange:
    """Has room for all gradients but one; tells what was there when it was told."""

    def __init__(self, module, without=None):
        self.places = {
            name: torch.full_like(parameter, float("nan"))
            for name, parameter in module.named_parameters()
            if name != without
        }
        self._names = {parameter.data_ptr(): name for name, parameter in module.named_parameters()}
        self.told = {}

    def place_for(self, parameter):
        return self.places.get(self._names[parameter.data_ptr()])

    def arrived(self, found):
        names = {place.data_ptr(): name for name, place in self.places.items()}
        for place, source in found:
            name = names[place.data_ptr()]
            assert name not in self.told
            self.told[name] = (place if source is None else source).clone()
            if source is not None:
                place.copy_(source)


def gradients_of(module, x, dy):
    own = copy.deepcopy(module)
    own(x).backward(dy)
    return {name: parameter.grad for name, parameter in own.named_parameters()}


@pytest.mark.parametrize("without", [None, "0.weight"])
def test_each_gradient_is_told_once_it_is_right(module, x, without):
    program = program_of(module, train=True)
    dy = torch.randn(program.graph.output_gradients[0][1].shape)
    wanted = gradients_of(module, x, dy)
    exchange = Exchange(module, without)
    with rehearsing(), torch.no_grad(), exchanging(exchange):
        program.forward(x)
        found = program.backward(dy)
    assert exchange.told.keys() == exchange.places.keys() == wanted.keys() - {without}
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)
        if name != without:
            assert found[name] is exchange.places[name]
            assert torch.equal(exchange.told[name], found[name])


def test_a_pass_of_its_own_graph_hands_nothing_over(module, x):
    program = program_of(module, train=True)
    dy = torch.randn(program.graph.output_gradients[0][1].shape)
    exchange = Exchange(module)
    with torch.no_grad(), exchanging(exchange):
        program.forward(x)
        program.backward(dy)
    assert exchange.told == {}
