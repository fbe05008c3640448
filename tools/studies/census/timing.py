"""Races networks that have no plan against the framework, in turns; each route has its own copy."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from turns import alone_on_gpu, beside_others

from plantune import optimize
from plantune.base.scopes import with_values
from plantune.devices.cuda.flags import cudnn
from plantune.devices.device import Device, Runnable, first_line
from plantune.devices.gpus import device_for
from plantune.devices.machine import environment_of
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.tracing.arguments import type_of
from plantune.graph.tracing.extract import extract
from plantune.kernels.build import build_all
from plantune.measure.racing.routes import ROUTES
from plantune.measure.timing import Effort, Timing, ratio_interval, time_interleaved
from plantune.measure.watches import call_watch
from plantune.plans.checked_plan import check_plan
from plantune.plans.guess import guessed_plan
from plantune.runtime.module import TunedModule
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

RIVALS = {
    "cuda": ("eager-channels-last", "cuda-graph", "compile-reduce-overhead"),
    "cpu": ("eager", "eager-channels-last"),
}
# Two races: what is only luck in one is not there in the other.
RACES = 2
FIRST_CALLS = 4


@dataclass(frozen=True)
class Race:
    """Against whom, None for all; and how long each of the races takes."""

    rivals: Sequence[str] | None = None
    seconds: float = 3.0

    def names(self, device: Device) -> Sequence[str]:
        return self.rivals or RIVALS[device.place.type]

    @property
    def effort(self) -> Effort:
        return Effort(budget_s=self.seconds, warm_up_s=self.seconds / 20, retries=0)


def compile_kernels(module: nn.Module, x: Tensor, mode: str, arch: str) -> None:
    """What the first call will compile, without a GPU."""
    last, images = as_raced(module, x)
    graph = extract(last, type_of(images))
    graph = differentiate(graph) if mode == "train" else graph
    space = load_search_space(arch)
    plan = guessed_plan(graph, space, network=type(module).__name__)
    if plan is not None:
        build_all(check_plan(plan, graph, space).steps, space.arch)


def ratios(module: nn.Module, x: Tensor, mode: str, race: Race) -> dict[str, Any]:
    """Our time as a part of each rival's, with its interval, in the worse of two races."""
    arch = load_arch(environment_of(x.device).arch)
    device = device_for(arch)
    last, images = as_raced(module, x)
    with (
        torch.set_grad_enabled(mode == "train"),
        with_values(cudnn, benchmark=True),
        device.own_stream(),
    ):
        with beside_others():
            ours, how, _ = ours_of(last, images, mode, device)
            # Loading comes first; it does not depend on algorithms.
            with with_values(cudnn, benchmark=False):
                made_call(last, images, mode, device)
        with alone_on_gpu():
            names = race.names(device)
            rivals, failures = rivals_of((module, x), (last, images), mode, names, device)
            return {**judged(ours, rivals, device, race), "failures": failures, **how}


def judged(
    ours: Runnable, rivals: Mapping[str, Runnable], device: Device, race: Race
) -> dict[str, dict[str, Any] | str]:
    """All in turns."""
    calls, watch = {"plantune": ours, **rivals}, call_watch(device)
    races = [time_interleaved([*calls.values()], race.effort, watch) for _ in range(RACES)]
    return {
        "device": environment_of(device.place).device,
        "ms": {name: races[-1][at].median_us / 1e3 for at, name in enumerate(calls)},
        "ratios": {name: _worse(races, at) for at, name in enumerate(calls) if at},
    }


def as_raced(module: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    """All get images and weights in channels_last, where they have four dimensions."""
    last = copy.deepcopy(module).to(memory_format=torch.channels_last)
    return last, x.contiguous(memory_format=torch.channels_last)


def _worse(races: list[list[Timing]], rival: int) -> list[float]:
    """The ratio and its 95 % interval."""
    found = [ratio_interval(race[0], race[rival]) for race in races]
    worst = max(found, key=lambda interval: interval.ratio)
    return [worst.ratio, worst.low, worst.high]


def ours_of(
    module: nn.Module, x: Tensor, mode: str, device: Device
) -> tuple[Runnable, dict[str, Any], TunedModule]:
    """Calls of what `optimize` makes, and how they run."""
    tuned = optimize(module, x, mode=mode, fallback="silent")
    began = time.monotonic()
    call = made_call(tuned, x, mode, device)
    families = Counter(choice.candidate.family for choice in tuned.pool().plan.choices)
    seconds = round(time.monotonic() - began, 2)
    told = {"how": tuned.last_call().how, "origin": tuned.pool().plan.written_origin}
    return call, {**told, "first_calls_s": seconds, "families": families}, tuned


def rivals_of(
    given: tuple[nn.Module, Tensor],
    last: tuple[nn.Module, Tensor],
    mode: str,
    names: Sequence[str],
    device: Device,
) -> tuple[dict[str, Runnable], dict[str, str]]:
    """Calls of the framework's routes by their names, and why others are left out."""
    calls, failures = {}, {}
    for name in names:
        route = ROUTES[device.place.type][name]
        module, x = last if route.channels_last else given
        own = copy.deepcopy(module)
        try:
            call = _warmed_up(_call(route.make(own, x), own, x, mode), device)
            calls[name] = device.captured(call) if route.captured else call
        except Exception as error:  # whatever a compiler says: that route is then left out
            failures[name] = first_line(error)[:200]
    return calls, failures


def made_call(module: nn.Module, x: Tensor, mode: str, device: Device) -> Runnable:
    """Calls of a module that was called before."""
    return _warmed_up(_call(module, module, x, mode), device)


def _warmed_up(call: Runnable, device: Device) -> Runnable:
    for _ in range(FIRST_CALLS):
        call()
    device.synchronize()
    return call


def _call(run: Any, module: nn.Module, x: Tensor, mode: str) -> Runnable:
    parameters = list(module.parameters())

    def infer() -> None:
        run(x)

    def train() -> None:
        for parameter in parameters:
            parameter.grad = None
        leaves = [leaf for leaf in tree_leaves(run(x)) if isinstance(leaf, Tensor)]
        torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])

    return train if mode == "train" else infer
