"""Gradients are reduced in buckets, in one order on all ranks, as early as they are there."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from plantune.errors import CaptureError
from plantune.models.se_resnet9 import SEResNet9Fixup
from plantune.runtime.captured.rehearsal import rehearsing
from plantune.runtime.program.exchange import current_exchange
from plantune.training import reduce as module
from plantune.training.loss_pass import LossPass
from plantune.training.reduce import Reducer, buckets_of
from plantune.training.update import FlatGradients

CPU = torch.device("cpu")


def test_buckets_are_whole_parameters_from_the_last_one_on():
    wide = [torch.zeros(n) for n in (6, 3, 8, 1)]
    half = [torch.zeros(n, dtype=torch.float16) for n in (20, 4)]
    layout = FlatGradients([wide[0], half[0], *wide[1:], half[1]], CPU).layout
    buckets = buckets_of(layout, 40)
    found = [(bucket.start, bucket.stop, sorted(bucket.members)) for bucket in buckets]
    assert found == [(12, 24, [3, 4]), (0, 32, [1, 5]), (0, 12, [0, 2])]
    assert [bucket.dtype.itemsize for bucket in buckets] == [4, 2, 4]
    assert sum(bucket.stop - bucket.start for bucket in buckets) == sum(layout.sizes.values())


def test_a_network_of_20_mb_sends_the_most_while_its_first_blocks_gradients_are_made():
    model = SEResNet9Fixup(3)
    names = [name for name, _ in model.named_parameters()]
    first, last = buckets_of(FlatGradients([*model.parameters()], CPU).layout)
    assert {names[at].split(".")[1] for at in first.members} == {"1", "2", "3"}
    assert {names[at] for at in last.members} > {n for n in names if n.startswith("layers.0.")}
    assert len(first.members | last.members) == len(names)


class Side:
    """A stream beside the current one, that tells when it begins."""

    def __init__(self, said):
        self._said = said

    def fork(self):
        self._said.append("fork")

    @contextmanager
    def inside(self):
        yield 0

    def join(self):
        self._said.append("join")


class TestOverlap:
    @pytest.fixture
    def layers(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))

    @pytest.fixture
    def said(self):
        return []

    @pytest.fixture
    def reducer(self, layers, said, monkeypatch):
        """Of three buckets, one for each layer; what is reduced becomes ten times as large."""

        def mean(flat, group):
            said.append(f"{flat.numel()} elements")
            flat.mul_(10)

        monkeypatch.setattr(module, "mean", mean)
        monkeypatch.setattr(module, "is_capturing", lambda: "captures" in said)
        ranks = SimpleNamespace(group=None, size=2, past=lambda: said.append("past"))
        gradients = FlatGradients([*layers.parameters()], CPU)
        places = [(40, 56, (4, 5)), (20, 40, (2, 3)), (0, 20, (0, 1))]
        three = [module.Bucket(torch.float32, *ends, frozenset(of)) for *ends, of in places]
        monkeypatch.setattr(module, "buckets_of", lambda layout: tuple(three))
        made = Reducer(ranks, gradients, CPU)
        made._side = Side(said)
        made._agreed = lambda: gradients.present
        return made

    def taken(self, layers, reducer, x, loss=cross_entropy):
        """Gradients of a pass that hands those of two layers to the exchange as they are made."""

        class Pass(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, *parameters):
                ctx.save_for_backward(x, *parameters)
                return x @ parameters[0].t() + parameters[1]

            @staticmethod
            def backward(ctx, dy):
                x, weight, _ = ctx.saved_tensors
                exchange, own = current_exchange(), (dy.t() @ x, dy.sum(0))
                if exchange is None:
                    return dy @ weight, *own
                places = [exchange.place_for(p.detach()) for p in ctx.saved_tensors[1:]]
                if places[0] is not None:
                    places[0].copy_(own[0])
                pairs = [
                    pair for pair in zip(places, (None, own[1]), strict=True) if pair[0] is not None
                ]
                exchange.arrived(pairs)
                return dy @ weight, *(
                    o if p is None else p for o, p in zip(own, places, strict=True)
                )

        def model(x):
            for layer in (layers[0], layers[1]):
                x = Pass.apply(x, layer.weight, layer.bias)
            return layers[2](x)

        passes = LossPass(model, loss, reducer._gradients.parameters)
        target = torch.zeros(len(x), dtype=torch.long)
        with reducer.passing():
            passes.run((x,), (target,), None, reducer.take)
        reducer.reduce()
        return [view.clone() for view in reducer._gradients.views]

    def wanted(self, layers, x, loss=cross_entropy):
        value = loss(layers(x), torch.zeros(len(x), dtype=torch.long))
        return [10 * gradient for gradient in torch.autograd.grad(value, [*layers.parameters()])]

    def test_a_bucket_waits_for_those_before_it(self, layers, reducer, said):
        """The last layer is autograd's, so nothing of the others is reduced before the end."""
        x = torch.randn(5, 4)
        torch.testing.assert_close(self.taken(layers, reducer, x), self.wanted(layers, x))
        assert said == ["past", "fork", "16 elements", *["fork", "20 elements"] * 2, "join"]

    def test_buckets_go_as_their_last_gradient_is_there(self, layers, reducer, said):
        reducer.buckets = reducer.buckets[1:]
        x = torch.randn(5, 4)
        taken = reducer.take
        reducer.take = lambda *given: (said.append("taken"), taken(*given))
        found = self.taken(layers, reducer, x)
        torch.testing.assert_close(found[:4], self.wanted(layers, x)[:4])
        assert said == [*["fork", "20 elements"] * 2, "taken", "past", "join"]

    def test_what_only_prepares_sends_nothing_and_others_may_still_be_met(
        self, layers, reducer, said
    ):
        x = torch.randn(5, 4)
        with rehearsing():
            self.taken(layers, reducer, x)
        assert said == [*["fork"] * 3, "join"]
        said[:] = ["captures"]
        self.taken(layers, reducer, x)
        assert "past" not in said

    def test_a_gradient_that_has_another_part_is_reduced_at_the_end(self, layers, reducer):
        def loss(y, target):
            return cross_entropy(y, target) + layers[0].weight.square().sum()

        x = torch.randn(5, 4)
        with pytest.raises(CaptureError, match="a part of another one"):
            self.taken(layers, reducer, x, loss)
        reducer.overlaps = True
        with rehearsing():  # which comes before a capture
            self.taken(layers, reducer, x, loss)
        assert not reducer.overlaps
        found = self.taken(layers, reducer, x, loss)
        torch.testing.assert_close(found, self.wanted(layers, x, loss))

    def test_so_is_one_whose_layer_is_used_twice(self, layers, reducer):
        layers[1] = layers[0]
        x = torch.randn(5, 4)
        with rehearsing():
            self.taken(layers, reducer, x)
        assert not reducer.overlaps

    def test_hooks_see_a_rank_s_own_gradients(self, layers, reducer):
        seen = []
        layers[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
        x = torch.randn(5, 4)
        found = self.taken(layers, reducer, x)
        torch.testing.assert_close(10 * seen[0], found[0])
        torch.testing.assert_close(found, self.wanted(layers, x))
