"""Whether training with plantune.TrainStep goes as with eager, beyond what single steps show.

    python tools/studies/follow_training.py free --dtype float16  # paired runs of 500 steps
    python tools/studies/follow_training.py steps --dtype amp     # single steps from one state
    torchrun --nproc-per-node 2 tools/studies/follow_training.py ranks --dtype amp

`free` trains pairs of one small network on one task, from the same weights and batches, with eager
(whose libraries may choose other algorithms) and with a TrainStep: with a schedule of the rate, a
loss scale that grows, batches that overflow, micro-batches, and an evaluation each tenth step. The
mean losses of the last tenth must differ by less than three standard errors of the paired
difference, that error must be below 2 % of the loss's fall, and the steps that were left out and
the optimizer's count must be equal. `steps` takes eager's own weights and optimizer state before
each of some steps of a run: the update of each parameter must be within twice eager's own error,
against float64. `ranks` is `free` for a TrainStep of all processes together, each with its part of
every batch, beside eager's with the whole one; parameters must be equal on all to the bit. Prints
one JSON object; exit code 1 if a bound does not hold.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from plantune import LossScale, TrainStep

CLASSES, PIXELS, BATCH, PARTS = 10, 16, 64, 2
# So seldom that a scale overflows where a batch has it do so alone: elsewhere chance would decide.
DECAY, GROWTH, NOISE, MAX_NORM = 0.01, 100, 3.0, 0.3
MOST_ERRORS, MOST_OF_FALL, MOST_RATIO = 3.0, 0.02, 2.0
# Beside eager's error: a few roundings of an update in float32.
SLACK = 2.0**-20


@dataclass(frozen=True)
class Settings:
    device: torch.device
    dtype: str  # of parameters and products; "amp" is float32 with products in float16
    steps: int
    group: dist.ProcessGroup | None = None

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def parameters(self) -> torch.dtype:
        return torch.float32 if self.dtype == "amp" else getattr(torch, self.dtype)

    @property
    def autocast(self) -> torch.dtype | None:
        products = torch.float16 if self.device.type == "cuda" else torch.bfloat16
        return products if self.dtype == "amp" else None

    @property
    def overflows(self) -> frozenset[int]:
        """Steps whose loss is infinite."""
        return frozenset((self.steps // 5, self.steps // 2, self.steps // 2 + 1))

    def casting(self) -> Any:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast)


def network(seed: int, settings: Settings) -> nn.Module:
    torch.manual_seed(seed)
    layers = (
        *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.GroupNorm(4, 16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.GroupNorm(4, 32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(64, CLASSES),
    )
    made = nn.Sequential(*layers).to(settings.device, settings.parameters)
    return made.to(memory_format=torch.channels_last)


def batches(seed: int, settings: Settings) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Images of ten noisy patterns, their numbers, and by what the loss is multiplied."""
    random = torch.Generator(settings.device).manual_seed(1000 + seed)
    place = {"device": settings.device, "generator": random}
    patterns = torch.randn(CLASSES, 3, PIXELS, PIXELS, **place)
    for step in range(settings.steps):
        y = torch.randint(CLASSES, (BATCH,), **place)
        x = patterns[y] + NOISE * torch.randn(BATCH, 3, PIXELS, PIXELS, **place)
        factor = float("inf") if step in settings.overflows else 1.0
        yield x.to(settings.parameters), y, torch.tensor(factor, device=settings.device)


def loss_of(outputs: Tensor, target: Tensor, factor: Tensor) -> Tensor:
    wide = outputs if outputs.dtype == torch.float64 else outputs.float()
    return cross_entropy(wide, target) * factor


def optimizer_of(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """AdamW, or SGD where the squares of gradients would be nothing in the parameters' dtype."""
    if settings.parameters in (torch.float16, torch.bfloat16):
        return torch.optim.SGD(model.parameters(), 0.05, 0.9, weight_decay=DECAY)
    return torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=DECAY)


class Eager:
    """The statements as one writes them."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.model, self.optimizer = model, optimizer_of(model, settings)
        self._settings = settings
        kind = settings.device.type
        self._scaler = torch.amp.GradScaler(kind, init_scale=64.0, growth_interval=GROWTH)

    def step(self, x: Tensor, y: Tensor, factor: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        losses = []
        for part, of_part in zip(x.chunk(PARTS), y.chunk(PARTS), strict=True):
            with self._settings.casting():
                loss = loss_of(self.model(part), of_part, factor)
            self._scaler.scale(loss / PARTS).backward()
            losses.append(loss.detach())
        # In 16 bits, too, as a GradScaler of torch's refuses.
        self._unscale()
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        return torch.stack(losses).mean()

    def _unscale(self) -> None:
        of_step = self._scaler._per_optimizer_states[id(self.optimizer)]
        inverse = self._scaler._scale.double().reciprocal().float()
        found = torch.zeros(1, device=inverse.device)
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        if grads[0].dtype != torch.bfloat16:
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse)
        else:  # torch's own does not take these on a GPU
            found.fill_(not all(bool(grad.isfinite().all()) for grad in grads))
            torch._foreach_mul_(grads, inverse)
        of_step["found_inf_per_device"] = {inverse.device: found}
        of_step["stage"] = torch.amp.grad_scaler.OptState.UNSCALED

    def over_ranks(self, losses: Tensor) -> Tensor:
        return losses

    def unequal(self) -> int:
        return 0

    def scale(self) -> dict[str, Any]:
        return self._scaler.state_dict()


class Ours:
    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.model, self.optimizer = model, optimizer_of(model, settings)
        self._scale = LossScale(64.0, growth_interval=GROWTH)
        self._group, self._ranks = settings.group, settings.ranks
        self._step = TrainStep(
            model,
            loss_of,
            self.optimizer,
            micro_batches=max(PARTS // self._ranks, 1),
            max_norm=MAX_NORM,
            scale=self._scale,
            autocast=settings.autocast,
            process_group=self._group,
        )

    def step(self, x: Tensor, y: Tensor, factor: Tensor) -> Tensor:
        if self._group is None:
            return self._step(x, y, factor)
        rank = self._group.rank()
        return self._step(x.chunk(self._ranks)[rank], y.chunk(self._ranks)[rank], factor)

    def over_ranks(self, losses: Tensor) -> Tensor:
        """The mean of what each of them has."""
        if self._group is not None:
            dist.all_reduce(losses := losses / self._ranks, group=self._group)
        return losses

    def unequal(self) -> int:
        """Parameters that are not rank 0's to the bit, on any rank."""
        if self._group is None:
            return 0
        found = []
        for parameter in self.model.parameters():
            own = parameter.detach().contiguous()
            dist.broadcast(first := own.clone(), 0, group=self._group)
            found.append((own != first).any())
        others = torch.stack(found).int()
        dist.all_reduce(others, dist.ReduceOp.MAX, group=self._group)
        return int(others.sum())

    def scale(self) -> dict[str, Any]:
        return self._scale.state_dict()


def trained(run: Eager | Ours, seed: int, settings: Settings) -> dict[str, Any]:
    """One run: its first and last losses, its evaluations, and what the optimizer counted."""
    rate = run.optimizer.defaults["lr"]
    schedule = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, rate, settings.steps + 1)
    losses, evaluated = [], []
    for number, (x, y, factor) in enumerate(batches(seed, settings)):
        losses.append(run.step(x, y, factor))
        schedule.step()
        if number % 10 == 9:
            with torch.no_grad(), settings.casting():
                evaluated.append(loss_of(run.model(x), y, torch.ones_like(factor)))
    found = run.over_ranks(torch.stack(losses)).double().cpu()
    found = found[found.isfinite()]
    tenth = max(settings.steps // 10, 1)
    counts = {int(state["step"]) for state in run.optimizer.state.values() if "step" in state}
    return {
        "first": float(found[:tenth].mean()),
        "last": float(found[-tenth:].mean()),
        "evaluated": float(torch.stack(evaluated)[-3:].mean()) if evaluated else None,
        "counts": sorted(counts),
        "scale": run.scale(),
        "unequal": run.unequal(),
    }


def pair(seed: int, settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """One run of each; cuDNN compares its algorithms for every other one of eager's."""
    model = network(seed, settings)
    with torch.backends.cudnn.flags(enabled=True, benchmark=bool(seed % 2)):
        theirs = trained(Eager(copy.deepcopy(model), settings), seed, settings)
    ours = trained(Ours(model, settings), seed, settings)
    print(f"{seed}: {ours['last']:.5f} and {theirs['last']:.5f}", file=sys.stderr, flush=True)
    return ours, theirs


def free(settings: Settings, runs: int, jobs: int = 1) -> dict[str, Any]:
    one = partial(pair, settings=settings)
    if jobs == 1:
        pairs = [one(seed) for seed in range(runs)]
    else:
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as processes:
            pairs = [*processes.map(one, range(runs))]
    apart = torch.tensor([own["last"] - their["last"] for own, their in pairs]).double()
    error = float(apart.std() / len(apart) ** 0.5) if runs > 1 else float("nan")
    fall = sum(their["first"] - their["last"] for _, their in pairs) / runs
    counted = all(own[what] == their[what] for own, their in pairs for what in ("counts", "scale"))
    equal = not any(own["unequal"] for own, _ in pairs)
    holds = abs(float(apart.mean())) <= MOST_ERRORS * error and counted and equal
    return {
        "differences": [round(float(each), 6) for each in apart],
        "mean_difference": float(apart.mean()),
        "standard_error": error,
        "fall": fall,
        "error_of_fall": error / fall,
        "counts_are_equal": counted,
        "unequal_parameters": sum(own["unequal"] for own, _ in pairs),
        "counts": [pairs[0][0]["counts"], pairs[0][1]["counts"]],
        "last": [[round(own["last"], 5), round(their["last"], 5)] for own, their in pairs],
        "holds": bool(holds and error < MOST_OF_FALL * fall),
    }


def updates(run: Eager | Ours, batch: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    before = [p.detach().double().clone() for p in run.model.parameters()]
    run.step(*batch)
    pairs = zip(run.model.parameters(), before, strict=True)
    return [p.detach().double() - was for p, was in pairs]


def steps(settings: Settings, sampled: int) -> dict[str, Any]:
    wide = Settings(settings.device, "float64", settings.steps)
    eager, ours = (kind(network(0, settings), settings) for kind in (Eager, Ours))
    exact = Eager(network(0, wide), wide)
    exact.optimizer = type(eager.optimizer)(exact.model.parameters())
    every = max(settings.steps // sampled, 1)
    squares = torch.zeros(3, sum(1 for _ in eager.model.parameters()), dtype=torch.float64)
    for number, batch in enumerate(batches(0, settings)):
        # Adam's first update has the size of the rate whatever the gradient: where that is nearly
        # nothing, rounding chooses the sign. So the sampled step is the last of `every`.
        if (number + 1) % every or number in settings.overflows:
            eager.step(*batch)
            continue
        for other in (ours, exact):
            other.model.load_state_dict(eager.model.state_dict())
            other.optimizer.load_state_dict(copy.deepcopy(eager.optimizer.state_dict()))
        x, y, factor = batch
        wanted = updates(exact, (x.double(), y, factor))
        both = updates(ours, batch), updates(eager, batch)
        for row, found in enumerate(both):
            apart = [(a - b).square().sum() for a, b in zip(found, wanted, strict=True)]
            squares[row] += torch.stack(apart).cpu()
        squares[2] += torch.stack([b.square().sum() for b in wanted]).cpu()
    own, their, size = squares.sqrt()
    names = [name for name, _ in eager.model.named_parameters()]
    # An update that 16 bits cannot hold is nothing for both.
    both = (own + (their == 0)) / (their + (their == 0))
    ratios = {name: round(float(ratio), 3) for name, ratio in zip(names, both, strict=True)}
    return {"ratios": ratios, "holds": bool((own <= MOST_RATIO * their + SLACK * size).all())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["free", "ranks", "steps"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype", default="float16", choices=["float16", "bfloat16", "amp", "float32"]
    )
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--runs", type=int, default=8, help="pairs of runs (free, ranks)")
    parser.add_argument("--jobs", type=int, default=1, help="processes for these pairs")
    parser.add_argument("--sampled", type=int, default=50, help="steps to compare (steps)")
    given = parser.parse_args()
    device, group = torch.device(given.device), None
    if given.what == "ranks":
        device, group = joined(device)
    settings = Settings(device, given.dtype, given.steps, group)
    compared = given.what != "steps"
    found = free(settings, given.runs, given.jobs) if compared else steps(settings, given.sampled)
    if group is None or group.rank() == 0:
        about = {"what": given.what, "ranks": settings.ranks, "dtype": given.dtype}
        print(json.dumps({**about, "steps": given.steps, **found}))
    if group is not None:
        dist.destroy_process_group()
    return 0 if found["holds"] else 1


def joined(device: torch.device) -> tuple[torch.device, dist.ProcessGroup]:
    """The processes of torchrun, each with a GPU of its own if there are any."""
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    group: dist.ProcessGroup = dist.group.WORLD
    return device, group


if __name__ == "__main__":
    sys.exit(main())
