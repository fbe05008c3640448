"""One of several processes that train a network together: `ddp_rank.py RANK RANKS FOLDER`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from plantune import optimize
from plantune.plans.plan import PROGRAM
from plantune.runtime.calls import choose

IMAGES, STEPS = 8, 3


def network() -> nn.Module:
    torch.manual_seed(5)
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 5))
    return nn.Sequential(*layers)


def batches() -> Tensor:
    return torch.randn(2 * STEPS, IMAGES, 3, 8, 8, generator=torch.Generator().manual_seed(6))


@contextmanager
def joined(rank: int, ranks: int, folder: Path) -> Iterator[None]:
    """Inside, this process can reach the others."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=ranks
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def train(rank: int, ranks: int) -> list[Tensor]:
    """The parameters after some steps of two backward passes each, in which this process has its
    part of each batch.
    """
    part = slice(rank * IMAGES // ranks, (rank + 1) * IMAGES // ranks)
    model = optimize(network(), batches()[0][part], mode="train")
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(wrapped.parameters(), 0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        with wrapped.no_sync():
            wrapped(batches()[2 * step][part]).square().mean().backward()
        wrapped(batches()[2 * step + 1][part]).square().mean().backward()
        optimizer.step()
    assert model.stats().eager == 0
    return [parameter.detach() for parameter in model.parameters()]


def send(learner: nn.Module) -> None:
    """From process 1."""
    for parameter in learner.parameters():
        torch.distributed.broadcast(parameter.data, 1)


def receive(actor: nn.Module, *, by_copy: bool) -> None:
    """Straight into the memory of the parameters, or into rows that are copied there."""
    for parameter in actor.parameters():
        place = torch.empty(parameter.shape) if by_copy else parameter.data
        torch.distributed.broadcast(place, 1)
        if by_copy:
            with torch.no_grad():
                parameter.copy_(place)


def learner() -> nn.Module:
    made = network()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(1.5)
    return made


if __name__ == "__main__":
    choose.UNPLANNED["cpu"] = PROGRAM
    with joined(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])):
        train(int(sys.argv[1]), int(sys.argv[2]))
        send(learner())
        send(learner())
