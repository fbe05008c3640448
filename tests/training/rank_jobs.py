"""What each of several processes does in tests of training together. They compute on CPUs, by gloo,
but for the jobs that say so, and keep what they found in a folder, as RANK.pt.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from plantune import LossScale, TrainStep, optimize
from plantune.errors import BuildError, PlantuneError
from plantune.plans.plan import EAGER, PROGRAM
from plantune.runtime.calls import choose
from plantune.training.groups import Group

IMAGES, STEPS = 8, 6
Found = dict[str, Any]


def network(seed: int = 5) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 5))
    return nn.Sequential(*layers)


def batches() -> list[tuple[Tensor, Tensor]]:
    numbers = torch.Generator().manual_seed(6)
    images = torch.randn(STEPS, IMAGES, 3, 8, 8, generator=numbers)
    return [*zip(images, torch.randint(5, (STEPS, IMAGES), generator=numbers), strict=True)]


def part(rank: int, ranks: int) -> slice:
    return slice(rank * IMAGES // ranks, (rank + 1) * IMAGES // ranks)


def overflowing(y: Tensor, target: Tensor, factor: Tensor) -> Tensor:
    """Gradients are infinite where the factor is."""
    return cross_entropy(y, target) * factor


def stepping(model: nn.Module, group: Group | None, loss: Any = cross_entropy, **more: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1)
    return TrainStep(model, loss, optimizer, process_group=group, deadline_s=20, **more)


def trained(group: Group | None, rank: int, ranks: int, **more: Any) -> Found:
    """Some steps, clipped, of which the third overflows on the last rank."""
    # Weights are those of rank 0.
    model, scale = network(5 + rank), LossScale(8.0, growth_interval=2)
    step = stepping(model, group, overflowing, max_norm=0.5, scale=scale, **more)
    values, norms, skipped = [], [], []
    for number, (x, y) in enumerate(batches()):
        infinite = number == 2 and rank == ranks - 1
        factor = torch.tensor(float("inf") if infinite else 1.0)
        values.append(step(x[part(rank, ranks)], y[part(rank, ranks)], factor))
        norms.append(step.gradient_norm)
        skipped.append(float(step.found_inf))
    made = [*step._models._made.values()]
    found = {"weights": model.state_dict(), "scale": scale.state_dict(), "skipped": skipped}
    found |= {"norms": torch.stack(norms), "values": torch.stack(values)}
    found["plans"] = [getattr(each, "plan", None) and each.plan.digest for each in made]
    step.close()
    return found


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except PlantuneError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def first_call(step: TrainStep, rank: int = 0, ranks: int = 1) -> Any:
    x, y = batches()[0]
    return step(x[part(rank, ranks)], y[part(rank, ranks)])


def disagreements(group: Group, rank: int, ranks: int) -> Found:
    """What is wrong on one rank is an error on all."""
    found = {"settings": said(lambda: stepping(network(), group, max_norm=1.0 + rank))}
    wide = network()
    if rank == 1:
        wide.to(memory_format=torch.channels_last)
    found["strides"] = said(lambda: stepping(wide, group))
    step, proved = stepping(network(), group), choose.Finder._proved

    def unusable(*_: Any) -> Any:
        raise BuildError("this chip has no such kernel")

    if rank == 1:
        choose.Finder._proved = unusable
    found["plan"] = said(lambda: first_call(step, rank, ranks))
    choose.Finder._proved = proved
    found["again"] = said(lambda: first_call(step, rank, ranks))
    return found


class Branching(nn.Module):
    """Each rank's loss depends on layers of its own, and none on the last one."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(6, 5) for _ in range(4))
        self.used = min(rank, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[self.used](x)


def branches(group: Group, rank: int) -> Found:
    model = Branching(rank)
    step = stepping(model, group)
    x = torch.ones(4, 6)
    for _ in range(2):
        step(x, torch.zeros(4, dtype=torch.long))
    return {"weights": model.state_dict(), "stepped": len(step.optimizer.state)}


def ragged(group: Group, rank: int) -> Found:
    """The last rank's batches are of other sizes in later calls."""
    model = network()
    step = stepping(model, group)
    for number, (x, y) in enumerate(batches()):
        size = 3 if rank and number >= 2 else 4
        step(x[:size], y[:size])
    return {"weights": model.state_dict()}


def tuned(group: Group, rank: int, ranks: int) -> Found:
    """A tuned module of each rank's own, which has another plan on the last one."""
    x, y = (tensor[part(rank, ranks)] for tensor in batches()[0])
    choose.UNPLANNED["cpu"] = PROGRAM if rank == 0 else EAGER
    model = optimize(network(), x, mode="train")
    found: Found = {"before": model.plan.digest}
    step = stepping(model, group)
    for _ in range(2):
        step(x, y)
    choose.UNPLANNED["cpu"] = PROGRAM
    return {**found, "after": model.plan.digest, "weights": model.state_dict()}


def together(group: Group, rank: int, ranks: int) -> Found:
    """All that two ranks do in one start, one after the other."""
    start = copy.deepcopy(network().state_dict())
    found = {"start": start, "trained": trained(group, rank, ranks)}
    found["half"] = trained(group, rank, ranks, reduce_dtype=torch.float16)
    found["micro"] = trained(group, rank, ranks, micro_batches=2)
    found["disagreements"] = disagreements(group, rank, ranks)
    found["tuned"] = tuned(group, rank, ranks)
    found["branches"] = branches(group, rank)
    found["ragged"] = ragged(group, rank)
    left = stepping(network(), group)
    first_call(left, rank, ranks)
    dist.destroy_process_group()
    found["left"] = said(lambda: first_call(left, rank, ranks))
    found["in another group"] = trained(second_group(rank, ranks), rank, ranks)
    return found


def second_group(rank: int, ranks: int) -> Group:
    """As docs/python.md makes it: torchrun's store still has where the first group's ranks were."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore("second", dist.TCPStore(host, port))
    wait = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=wait)
    return dist.group.WORLD


def in_pairs(group: Group, rank: int, ranks: int) -> Found:
    """Four ranks as two groups, beside each other, then all four."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    found = {"pair": trained(pairs[rank % 2], rank // 2, 2)}
    return {**found, "all": trained(group, rank, ranks)}


def captured(step: Any) -> list[bool]:
    return [kind.captured is not None for kind in step._run._kinds.values()]


def on_gpus(group: Group, rank: int, ranks: int) -> Found:
    """As on CPUs, in graphs; the group ends while these live."""
    model = network(5 + rank).cuda()
    step = stepping(model, group, max_norm=0.5, scale=LossScale(8.0, growth_interval=2))
    every = [(x.cuda(), y.cuda()) for x, y in batches()]
    for number in range(20 * STEPS):
        x, y = every[number % STEPS]
        step(x[part(rank, ranks)], y[part(rank, ranks)])
    found: Found = {"captured": captured(step)}
    # A gradient that is not the pass's alone is reduced at its end.
    other = network(5).cuda()
    penalty = stepping(
        other, group, lambda y, t: cross_entropy(y, t) + other[0].weight.square().sum()
    )
    for x, y in every:
        penalty(x[part(rank, ranks)], y[part(rank, ranks)])
    found |= {"captured with a penalty": captured(penalty)}
    for name, module in {"weights": model, "penalized": other}.items():
        found[name] = {key: value.cpu() for key, value in module.state_dict().items()}
    found["sent"] = [y.cpu() for y in sent(rank, every[0][0])]
    dist.destroy_process_group()
    return found


def sent(rank: int, x: Tensor) -> list[Tensor]:
    """What an actor of each rank says of the same images, before and after rank 0 has sent its
    weights into the memory of the others', twice; the last is eager's word.
    """
    model = network(5 + rank).cuda().eval()
    actor = optimize(model, x, share=True)
    with torch.no_grad():
        found = [actor(x) for _ in range(3)][-1:]
        for factor in (1.0, 1.5):
            for parameter in model.parameters():
                if rank == 0:
                    parameter.mul_(factor)
                dist.broadcast(parameter.data, 0)
            found.append(actor(x))
        return [*found, model(x)]


def breaking(group: Group, rank: int, ranks: int, when: str) -> Found:
    """Rank 1 raises before a step, in the middle of one, or after some; rank 0 must not hang."""

    def loss(y: Tensor, target: Tensor) -> Tensor:
        if rank == 1 and when == "during":
            raise ValueError("no luck")
        return cross_entropy(y, target)

    step = stepping(network(), group, loss)
    if rank == 1 and when == "before":
        raise ValueError("no luck")
    for _ in range(3):
        first_call(step, rank, ranks)
    if rank == 1:
        raise ValueError("no luck")
    first_call(step, rank, ranks)
    return {}


ON_GPUS: dict[str, Callable[..., Found]] = {"on gpus": on_gpus}
JOBS: dict[str, Callable[..., Found]] = {
    **ON_GPUS,
    "together": together,
    "in pairs": in_pairs,
    "breaking": breaking,
}


def main(job: str, folder: str, *arguments: str) -> None:
    choose.UNPLANNED["cpu"] = PROGRAM
    torch.set_num_threads(1)
    if job in ON_GPUS:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if job in ON_GPUS else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    found = JOBS[job](dist.group.WORLD, rank, dist.get_world_size(), *arguments)
    torch.save(found, Path(folder) / f"{rank}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
