"""Calls of fewer samples than there are plans for, padded on request."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from plantune import optimize


class Heads(nn.Module):
    """Two results of images, numbers by name, and a table that all samples share."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, x, table, *, scale=None):
        y = self.conv(x).relu()
        scores = self.fc(y.mean((2, 3))) + table
        return {"map": y, "scores": scores if scale is None else scores * scale}


@pytest.fixture
def heads():
    return Heads().eval()


@pytest.fixture
def padded(heads):
    x, table, scale = torch.randn(2, 3, 5, 5), torch.randn(2), torch.randn(2, 1)
    # A table of as many rows as the example has samples would be taken for samples.
    return optimize(heads, x[:1], table, scale=scale[:1], pad_to=(8, 4), fallback="error")


def call(count):
    return (torch.randn(count, 3, 5, 5), torch.randn(2)), {"scale": torch.randn(count, 1)}


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8])
def test_a_call_of_fewer_samples_gives_theirs(padded, heads, count):
    args, named = call(count)
    got, wanted = padded(*args, **named), heads(*args, **named)
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-5)
    assert padded.last_call().how != "none"


def test_there_is_one_plan_for_each_size(padded):
    for count in (1, 2, 3, 4, 5, 6, 7, 8):
        args, named = call(count)
        padded(*args, **named)
    sizes = [pool.graph.inputs[0][1].shape[0] for pool in padded.pools()]
    assert sorted(sizes) == [4, 8]


@pytest.mark.parametrize("shape", [(5, 3, 5, 5), (3, 3, 6, 5), (0, 3, 5, 5)])
def test_more_samples_none_and_other_shapes_are_as_without(heads, shape):
    tuned = optimize(heads, torch.randn(3, 3, 5, 5), torch.randn(2), pad_to=4, fallback="silent")
    x, table = torch.randn(shape), torch.randn(2)
    for name, wanted in heads(x, table).items():
        torch.testing.assert_close(tuned(x, table)[name], wanted)
    assert tuned.last_call().how == "eager"


def test_it_may_be_copied_and_pickled(padded, heads):
    args, named = call(3)
    wanted = heads(*args, **named)["scores"]
    for other in (copy.deepcopy(padded), pickle.loads(pickle.dumps(padded))):
        got = other(*args, **named)["scores"]
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


class Transposed(nn.Module):
    def forward(self, x):
        return x.t() * 2


class Total(nn.Module):
    def forward(self, x):
        return x * 2, x.shape[0]


@pytest.mark.parametrize("module", [Transposed(), Total()])
def test_results_that_do_not_begin_with_the_samples_are_refused(module):
    with pytest.raises(ValueError, match="must begin with the samples"):
        optimize(module, torch.randn(4, 4), pad_to=4)


@pytest.mark.parametrize("sizes", [0, (), (4, -1), (2.5,)])
def test_sizes_are_numbers_of_samples(sizes):
    with pytest.raises(ValueError, match="numbers of samples"):
        optimize(nn.Linear(4, 2), torch.randn(4, 4), pad_to=sizes)


def test_state_and_gradients_are_refused():
    x, norm = torch.randn(4, 3, 2, 2), nn.BatchNorm2d(3)
    with pytest.raises(ValueError, match="moves buffers"):
        optimize(norm, x, pad_to=4)
    with pytest.raises(ValueError, match="mode='infer'"):
        optimize(norm, x, pad_to=4, mode="train")
    with pytest.raises(ValueError, match="no axis of samples"):
        optimize(nn.ReLU(), torch.tensor(1.0), pad_to=4)


@torch.no_grad()
def test_in_training_the_samples_added_move_no_statistics():
    """Which is known of the module as it was at first."""
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
    tuned = optimize(module, torch.randn(8, 4), pad_to=8, fallback="silent")
    for trains in (False, True, False):
        x = torch.randn(5, 4)
        torch.testing.assert_close(tuned.train(trains)(x), module.train(trains)(x))
        assert not trains or tuned.last_call().how == "eager"
        for ours, wanted in zip(tuned.buffers(), module.buffers(), strict=True):
            torch.testing.assert_close(ours, wanted)
