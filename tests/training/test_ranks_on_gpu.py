"""A training step of a process group, captured on one GPU: what several do is in test_ranks.py."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from plantune import LossScale, TrainStep
from plantune.runtime.program.exchange import current_exchange
from plantune.training.reduce import Reducer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU"),
]


@pytest.fixture
def group():
    """Of this process alone."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def network():
    layers = (nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 49, 5)).cuda()


@pytest.fixture
def images():
    return [
        (torch.randn(8, 3, 16, 16, device="cuda"), torch.randint(5, (8,), device="cuda"))
        for _ in range(12)
    ]


@pytest.fixture
def reduced(monkeypatch):
    """For each bucket, whether it was reduced in a backward pass of a capture."""
    found, enqueue = [], Reducer._enqueue

    def noted(self, bucket):
        inside = current_exchange() is not None
        found.append(inside and torch.cuda.is_current_stream_capturing())
        enqueue(self, bucket)

    monkeypatch.setattr(Reducer, "_enqueue", noted)
    monkeypatch.setattr("plantune.training.reduce.BUCKET_BYTES", 4096)
    return found


def trained(model, images, loss=cross_entropy, **more):
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    step = TrainStep(model, loss, optimizer, max_norm=0.5, scale=LossScale(64.0), **more)
    values = [step(x, y) for x, y in images]
    assert [kind.captured is not None for kind in step._run._kinds.values()] == [True]
    return step, values


@pytest.mark.parametrize("wire", [None, torch.float16])
def test_of_one_rank_it_is_the_step_without_a_group(network, images, group, reduced, wire):
    other = copy.deepcopy(network)
    more = {"process_group": group, "reduce_dtype": wire, "deadline_s": 60}
    _, values = trained(network, images, **more)
    _, wanted = trained(other, images)
    assert any(reduced)  # in the middle of a captured pass
    # cuDNN's gradients of weights may differ from run to run.
    bound = {"rtol": 1e-4, "atol": 1e-5} if wire is None else {"rtol": 2e-2, "atol": 2e-3}
    torch.testing.assert_close(values, wanted, **bound)
    torch.testing.assert_close(network.state_dict(), other.state_dict(), **bound)


def test_a_loss_that_reads_a_weight_is_reduced_after_the_pass(network, images, group, reduced):
    other = copy.deepcopy(network)

    def penalized(model):
        return lambda y, t: cross_entropy(y, t) + model[0].weight.square().sum()

    trained(network, images, penalized(network), process_group=group)
    trained(other, images, penalized(other))
    assert not any(reduced)
    torch.testing.assert_close(network.state_dict(), other.state_dict())


def test_a_group_ends_while_graphs_hold_its_collectives(network, images, group):
    step, _ = trained(network, images, process_group=group)
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="no longer takes part"):
        step(*images[0])
