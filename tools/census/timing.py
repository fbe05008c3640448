"""Races a network that has no plan against the framework, in turns, each way with its own copy."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plantune import optimize
from plantune.cuda.flags import flags
from plantune.device import Call, first_line
from plantune.gpus import device_for
from plantune.machine import environment_of
from plantune.measure.timing import Effort, Timing, ratio_interval, time_interleaved
from plantune.measure.watches import call_watch
from plantune.measure.ways import WAYS
from plantune.space.arch import load_arch

RIVALS = {
    "cuda": ("eager-channels-last", "compile-reduce-overhead"),
    "cpu": ("eager", "eager-channels-last"),
}
EFFORT = Effort(budget_s=3.0, warm_up_s=0.5)
# Two races: what is only luck in one is not there in the other.
RACES = 2
FIRST_CALLS = 4


def ratios(module: nn.Module, x: Tensor, mode: str) -> dict[str, Any]:
    """Our time as a part of each rival's, with its interval, in the worse of two races."""
    arch = load_arch(environment_of(x.device).arch)
    calls, failures = _calls(module, x, mode, arch.kind)
    watch = call_watch(device_for(arch))
    with torch.set_grad_enabled(mode == "train"), flags(benchmark=True):
        for call in calls.values():
            for _ in range(FIRST_CALLS):
                call()
        races = [time_interleaved(list(calls.values()), EFFORT, watch) for _ in range(RACES)]
    names = list(calls)
    return {
        "device": environment_of(x.device).device,
        "ms": {name: races[-1][at].median_us / 1e3 for at, name in enumerate(names)},
        "ratios": {name: _worse(races, at) for at, name in enumerate(names) if at},
        "failures": failures,
    }


def _worse(races: list[list[Timing]], rival: int) -> list[float]:
    """The ratio and its 95 % interval."""
    found = [ratio_interval(race[0], race[rival]) for race in races]
    worst = max(found, key=lambda interval: interval.ratio)
    return [worst.ratio, worst.low, worst.high]


def _calls(module: nn.Module, x: Tensor, mode: str, kind: str) -> tuple[dict[str, Call], Any]:
    """Ours first. All get images and weights in channels_last, where they have four dimensions."""
    last = copy.deepcopy(module).to(memory_format=torch.channels_last)
    images = x.contiguous(memory_format=torch.channels_last)
    tuned = optimize(last, images, mode=mode, fallback="silent")
    calls, failures = {"plantune": _call(tuned, tuned, images, mode)}, {}
    for name in RIVALS[kind]:
        way = WAYS[kind][name]
        own, given = (last, images) if way.channels_last else (module, x)
        own = copy.deepcopy(own)
        try:
            call = _call(way.make(own, given), own, given, mode)
            with torch.set_grad_enabled(mode == "train"):
                call()
        except Exception as error:  # whatever a compiler says: that way is then left out
            failures[name] = first_line(error)[:200]
        else:
            calls[name] = call
    return calls, failures


def _call(run: Any, module: nn.Module, x: Tensor, mode: str) -> Call:
    parameters = list(module.parameters())

    def infer() -> None:
        run(x)

    def train() -> None:
        for parameter in parameters:
            parameter.grad = None
        leaves = [leaf for leaf in tree_leaves(run(x)) if isinstance(leaf, Tensor)]
        torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])

    return train if mode == "train" else infer
