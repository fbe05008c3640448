"""Whether calls of a tuned module stay right while everything about it changes, at any length.

    python tools/studies/change_weights.py --calls 100000
    python tools/studies/change_weights.py --device cuda --processes 12 --every 10 --compared 0.1

Before each `--every`th call the weights, settings or modes of a small network change by a route
that the docs promise, chosen at random; output, gradients and statistics of that call, and of a
part of the others, are compared with the reference's on the same weights. Plans are as estimates
choose them, and on a CPU picked by hand, so that kernels keep copies of weights. Prints one JSON
object: the calls that were wrong and the change before each, and what each process held in MiB half
way and at the end. Exit code 1 if a call was wrong, memory grew, or few calls ran from plans.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from plantune import TunedModule, optimize
from plantune.devices.cuda.flags import plain_float32
from plantune.plans.guess import COMPILED, hand_plan

CHOOSE = "plantune.runtime.calls.choose"
PIXELS, AT_ONCE = 8, 200
# Of few, so that graphs come again.
GAINS = (0.5, 2.0)
MOST_GROWTH_MIB = 32.0
# A run that is shorter meets forms of the call for the first time in its second half, too.
SETTLED = 2_000
# What a tensor may be off by, as a part of its largest number, and of the largest of all: sums of
# terms that cancel, such as the gradient of a bias before a batch norm, are off by their roundings.
ALLOWED = {"float32": (1e-3, 1e-6), "float16": (0.05, 5e-3)}
OVERFLOW = -1.0

Change = Callable[[Any], object]
side_stream = cache(torch.cuda.Stream)


@dataclass(frozen=True)
class Settings:
    calls: int
    device: str = "cpu"
    dtype: str = "float32"
    every: int = 1
    compared: float = 1.0
    seconds: float = float("inf")

    @property
    def place(self) -> dict[str, Any]:
        return {"device": self.device, "dtype": getattr(torch, self.dtype)}

    @property
    def planes(self) -> tuple[int, int]:
        """Of images and of the convolution; on a GPU as many as kernels read at once."""
        return (8, 16) if self.device == "cuda" else (3, 4)


class Net(nn.Module):
    def __init__(self, images: int, planes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(images, planes, 3)
        self.norm = nn.BatchNorm2d(planes)
        self.head = nn.Linear(planes, 8)
        self._gain = [1.0]
        self.settings = {"gains": (1.0, [2.0])}

    def forward(self, x: Tensor) -> Tensor:
        # No ReLU: where an input is about zero, its gradient jumps by chance.
        y: Tensor = self.head(nn.functional.silu(self.norm(self.conv(x))).mean((2, 3)))
        return y * self._gain[0] * self.settings["gains"][1][0]


def factor() -> float:
    return random.choice([0.75, 1.3])


def scale_all(m: Any) -> None:
    torch._foreach_mul_(list(m.parameters()), factor())


def step(m: Any, **options: Any) -> None:
    for parameter in m.parameters():
        parameter.grad = torch.randn_like(parameter)
    # In 16 bits a smaller eps is none.
    torch.optim.AdamW(m.parameters(), 0.05, eps=1e-3, **options).step()


def another_head(m: Any) -> None:
    m.head = nn.Linear(m.conv.out_channels, 8 * random.randint(1, 2)).to(m.conv.weight)


def another_vector(m: Any) -> None:
    count = sum(p.numel() for p in m.parameters())
    nn.utils.vector_to_parameters(torch.randn(count).to(m.conv.weight), m.parameters())


def other_strides(m: Any) -> None:
    m.to(memory_format=random.choice([torch.contiguous_format, torch.channels_last]))


def through_float64(m: Any) -> None:
    dtype = m.head.weight.dtype
    m.double().to(dtype)


def plain_forward(m: Any) -> None:
    vars(m.conv).pop("forward", None)


def another_forward(m: Any) -> None:
    plain_forward(m)
    plain, scale = m.conv.forward, random.choice(GAINS)
    m.conv.forward = lambda x: plain(x) * scale


def another_conv(m: Any) -> None:
    plain_forward(m)
    m.conv = copy.deepcopy(m.conv)


def swapped(m: Any) -> None:
    with suppress(RuntimeError):  # torch refuses what somebody else holds
        torch.utils.swap_tensors(m.head.weight, nn.Parameter(torch.randn_like(m.head.weight)))


def write_unseen(m: Any) -> None:
    m.conv.weight.data.mul_(factor())


def write_to_the_storage(m: Any) -> None:
    weight = m.head.weight.detach()
    weight.new_empty(0).set_(weight.untyped_storage()).mul_(factor())


def write_in_inference_mode(m: Any) -> None:
    with torch.inference_mode():
        m.conv.weight.mul_(factor())


def write_and_refresh(m: Any, write: Change = write_unseen, **options: bool) -> None:
    write(m)
    m.refresh(**options)


def on_another_stream(m: Any) -> None:
    side = side_stream()  # one: for each of 32 torch keeps 34 MiB once cuBLAS was used there
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000)
        scale_all(m)
    torch.cuda.current_stream().wait_stream(side)


def by_a_replayed_graph(m: Any) -> None:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        scale_all(m)
    graph.replay()
    torch.cuda.synchronize()  # the graph's memory goes with it


CHANGES: Mapping[str, Change] = {
    "an optimizer's step": step,
    "a fused step": partial(step, fused=True),
    "a foreach step": partial(step, foreach=True),
    "foreach": scale_all,
    "load_state_dict": lambda m: m.load_state_dict(
        {k: v + (v.dim() > 1) for k, v in m.state_dict().items()}
    ),
    "assign=True": lambda m: m.load_state_dict(copy.deepcopy(m.state_dict()), assign=True),
    "vector_to_parameters": another_vector,
    "weight.data =": lambda m: setattr(m.conv.weight, "data", m.conv.weight.data * factor()),
    "copy_": lambda m: m.head.weight.copy_(torch.randn_like(m.head.weight)),
    "a part": lambda m: m.conv.weight[0].mul_(factor()),
    "set_": lambda m: m.conv.weight.set_(m.conv.weight * factor()),
    "swap_tensors": swapped,
    "another parameter": lambda m: setattr(
        m.head, "weight", nn.Parameter(torch.randn_like(m.head.weight))
    ),
    "another buffer": lambda m: m.norm.register_buffer(
        "running_mean", torch.randn_like(m.norm.running_mean)
    ),
    "another head": another_head,
    "another convolution": another_conv,
    "another forward": another_forward,
    "the plain forward": plain_forward,
    "a list": lambda m: m._gain.__setitem__(0, random.choice(GAINS)),
    "a nested list": lambda m: m.settings["gains"][1].__setitem__(0, random.choice(GAINS)),
    "padding": lambda m: setattr(m.conv, "padding", (random.randint(0, 2),) * 2),
    "train": lambda m: m.train(),
    "eval": lambda m: m.eval(),
    "mode of the norm": lambda m: m.norm.train(not m.norm.training),
    "requires_grad": lambda m: m.conv.weight.requires_grad_(not m.conv.weight.requires_grad),
    "strides": other_strides,
    "through float64": through_float64,
    "refresh": write_and_refresh,
    "refresh of weights": partial(write_and_refresh, weights_only=True),
    "refresh after inference_mode": partial(write_and_refresh, write=write_in_inference_mode),
    "refresh after a storage": partial(write_and_refresh, write=write_to_the_storage),
}
# What a CPU sees after a refresh alone.
ON_A_GPU: Mapping[str, Change] = {
    "data": write_unseen,
    "inference_mode": write_in_inference_mode,
    "a storage": write_to_the_storage,
    "another stream": on_another_stream,
    "a replayed graph": by_a_replayed_graph,
}


def results(module: nn.Module, x: Tensor, *, trains: bool) -> list[Tensor | None]:
    """The output, the gradients, and the statistics that moved."""
    module.zero_grad()
    with torch.set_grad_enabled(trains):
        y = module(x)
    if trains:
        y.float().square().mean().backward()
    gradients = [p.grad for p in module.parameters()]
    return [y.detach(), *gradients, *(b.clone() for b in module.buffers())]


def error_of(model: TunedModule, x: Tensor, settings: Settings, *, trains: bool) -> Tensor:
    """How far the worst tensor is off, as a part of what is allowed; OVERFLOW where the reference
    is not finite itself.
    """
    before = [b.clone() for b in model.buffers()]
    ours = results(model, x, trains=trains)
    if model.norm.training:  # else nothing moved, and a write would hide a stale weight
        with torch.no_grad():
            for buffer, old in zip(model.buffers(), before, strict=True):
                buffer.copy_(old)
    # The reference itself runs on the same weights.
    theirs = results(model.reference, x, trains=trains)
    if [t is None for t in ours] != [t is None for t in theirs]:
        return torch.tensor(float("inf"), device=x.device)
    got, wanted = ([t.float() for t in every if t is not None] for every in (ours, theirs))
    errors, scales = (
        torch.stack([t.abs().max() for t in every])
        for every in (torch._foreach_sub(got, wanted), wanted)
    )
    part, part_of_all = ALLOWED[settings.dtype]
    worst = (errors / (part * scales + part_of_all * scales.max() + 1e-4)).max()
    return torch.where(scales.max().isfinite(), worst, OVERFLOW)


class Run:
    """Calls of one module, changed at random."""

    def __init__(self, seed: int, settings: Settings) -> None:
        random.seed(seed)
        torch.manual_seed(seed)
        self._settings = settings
        self.seed, self.calls = seed, 0
        self.changes = {**CHANGES, **(ON_A_GPU if settings.device == "cuda" else {})}
        self.wrong: list[tuple[int, float, str]] = []
        self.overflows = self.compared = 0
        self.model = optimize(
            Net(*settings.planes).to(**settings.place).train(),
            self._images(2),
            mode="train",
            fallback="silent",
        )
        # Since errors were looked at: those, the calls, and the last change before each.
        self._errors: list[Tensor] = []
        self._after: list[tuple[int, str]] = []
        self._last = "nothing"

    def _images(self, batch: int) -> Tensor:
        return torch.randn(batch, self._settings.planes[0], PIXELS, PIXELS, **self._settings.place)

    def call(self) -> None:
        changes = self.calls % self._settings.every == 0
        if changes:
            self._last = random.choice([*self.changes])
            with torch.no_grad():
                self.changes[self._last](self.model)
        x, trains = self._images(random.choice([2, 2, 3])), random.random() < 0.5
        if changes or random.random() < self._settings.compared:
            self._errors.append(error_of(self.model, x, self._settings, trains=trains))
            self._after.append((self.calls, self._last))
        else:
            results(self.model, x, trains=trains)
        self.calls += 1
        if len(self._errors) == AT_ONCE:
            self.look()

    def look(self) -> None:
        """Asks a GPU for its errors, once for many calls."""
        errors = torch.stack(self._errors).tolist() if self._errors else []
        found = zip(errors, self._after, strict=True)
        self.overflows += errors.count(OVERFLOW)
        self.compared += len(errors)
        self.wrong += [(call, error, after) for error, (call, after) in found if not error < 1]
        self._errors, self._after = [], []


def held_mib(model: TunedModule) -> list[float]:
    """By the process and of the GPU, without spare memory and programs, which chance makes many."""
    for _ in range(2):  # one keeps those that it ends
        model.refresh()
    gc.collect()
    torch.cuda.empty_cache()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    gpu = torch.cuda.memory_reserved()
    return [round(held / 2**20, 1) for held in (pages * 4096, gpu)]


def followed(seed: int, settings: Settings) -> dict[str, Any]:
    torch.set_num_threads(1)
    by_hand = partial(hand_plan, without=COMPILED)
    plans = patch(f"{CHOOSE}.guessed_plan", by_hand) if settings.device == "cpu" else nullcontext()
    # Each call is compared here, so that no plan need be proved before. TF32 is too coarse.
    with plain_float32(), plans, patch(f"{CHOOSE}.is_proved", lambda *plan: True):
        run, start = Run(seed, settings), time.monotonic()
        held, part = [], 0.0
        while part < 1:
            run.call()
            part = max(run.calls / settings.calls, (time.monotonic() - start) / settings.seconds)
            if part >= 0.5 and not held:
                held = held_mib(run.model)
        run.look()
        stats = run.model.stats()
    print(f"{seed}: {run.calls} calls, wrong {run.wrong[:3]}", file=sys.stderr, flush=True)
    return {
        "seed": seed,
        "calls": run.calls,
        "wrong": run.wrong,
        "compared": run.compared,
        "overflows": run.overflows,
        "planned": stats.planned,
        "eager": stats.eager,
        "instances": stats.instances,
        "captures": stats.captures,
        "held_mib": [held, held_mib(run.model)],
    }


def grew(run: Mapping[str, Any]) -> bool:
    if run["calls"] < SETTLED:
        return False
    before, after = run["held_mib"]
    return any(now > was + MOST_GROWTH_MIB for was, now in zip(before, after, strict=False))


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    counts = ("calls", "compared", "overflows", "planned", "eager", "captures")
    wrong = [(run["seed"], *each) for run in runs for each in run["wrong"]]
    planned, calls = (sum(run[what] for run in runs) for what in ("planned", "calls"))
    return {
        **{what: sum(run[what] for run in runs) for what in counts},
        "instances": max(run["instances"] for run in runs),
        "held_mib": [run["held_mib"] for run in runs],
        "wrong": wrong[:20],
        "count_wrong": len(wrong),
        "holds": not wrong and planned > calls / 4 and not any(map(grew, runs)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=100_000, help="of all processes together")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=[*ALLOWED])
    parser.add_argument("--every", type=int, default=1, help="calls to a change")
    parser.add_argument("--compared", type=float, default=1.0, help="part of the other calls")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="ends calls early")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    each, place = -(-given.calls // (2 * given.processes)) * 2, (given.device, given.dtype)
    settings = Settings(each, *place, given.every, given.compared, given.seconds)
    seeds = range(given.seed, given.seed + given.processes)
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "plantune"])  # once for all
    with ProcessPoolExecutor(given.processes, context) as pool:
        found = summary([*pool.map(partial(followed, settings=settings), seeds)])
    print(json.dumps(found))
    return 0 if found["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
