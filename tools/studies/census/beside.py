"""Rivals that are compiled while a search measures, and the race with what it found."""

from __future__ import annotations

import copy
import inspect
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import speed
import torch
from asked import Asked, Row
from timing import as_raced, judged, made_call, ours_of, rivals_of
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from turns import CORES, MANY, OWN

from plantune.base.scopes import with_values
from plantune.devices.cuda.flags import cudnn
from plantune.devices.device import Device, Runnable
from plantune.devices.gpus import device_for
from plantune.devices.machine import environment_of
from plantune.measure.racing.routes import ROUTES
from plantune.measure.worker.turns import turn
from plantune.space.arch import load_arch

RIVALS = ("compile-reduce-overhead", "cuda-graph")
# Its compilers try many kernels: for some networks, after all have raced against the others.
LATE = ("compile-max-autotune",)
# A search's compilers give way to the rivals', and both leave the last cores to what is timed.
COMPILERS, WITHOUT_SEARCH, TIMED = slice(4, -CORES), slice(-CORES), slice(-CORES, None)
AGAIN_S = 1.0


class TimeUp(BaseException):
    """No Exception: torch's compilers would take it for a fault of their own."""


@dataclass
class Ready:
    """A network's rivals, compiled in this process."""

    module: nn.Module
    x: Tensor
    last: tuple[nn.Module, Tensor]
    device: Device
    calls: dict[str, Runnable]
    failures: dict[str, str]
    tuned: nn.Module | None = None


_READY: dict[str, Ready] = {}


def compile_rivals(name: str, asked: Asked) -> Row:
    """Beside those that it has compiled before. What is not compiled when its time is up does not
    race.
    """
    with on_cores(COMPILERS if asked.beside_search else WITHOUT_SEARCH):
        _compiler_takes_turns()
        ready = _READY.get(name) or _prepared(name, asked)
        seconds = dict[str, float]()
        with _as_in_race(asked, ready.device):
            for route in _routes(ready, asked, captured=False):
                began = time.monotonic()
                calls, failures = _in_time(
                    asked.compile_until, lambda route=route: _made(ready, asked, route)
                )
                ready.calls |= calls
                ready.failures |= failures or ({} if calls else {route: "not compiled in time"})
                seconds[route] = round(time.monotonic() - began, 1)
    return {"verdict": "compiled", "compile_s": seconds, "failures": ready.failures}


def race(name: str, asked: Asked) -> Row:
    """`optimize` with the plan that was stored meanwhile, beside the rivals of this process."""
    if name not in _READY:  # its process has ended: those that are in the cache
        compile_rivals(name, asked)
    ready = _READY[name]
    with turn(), on_cores(TIMED), _as_in_race(asked, ready.device):
        for route in _routes(ready, asked, captured=True):
            calls, failures = _made(ready, asked, route)
            ready.calls |= calls
            ready.failures |= failures
        ours, how, ready.tuned = ours_of(*ready.last, asked.mode, ready.device)
        row = {**judged(ours, ready.calls, ready.device, asked.race), "failures": ready.failures}
    return {**row, **how, "verdict": "no plan" if how["origin"] == "default" else "timed"}


def _prepared(name: str, asked: Asked) -> Ready:
    module, x = speed.on_its_device(name, asked)
    device = device_for(load_arch(environment_of(x.device).arch))
    ready = _READY[name] = Ready(module, x, as_raced(module, x), device, {}, {})
    with _as_in_race(asked, device), turn():
        # cuDNN times its algorithms here; what is compiled finds them known.
        made_call(*ready.last, asked.mode, device)
    return ready


@contextmanager
def _as_in_race(asked: Asked, device: Device) -> Iterator[None]:
    graded = torch.set_grad_enabled(asked.mode == "train")
    with graded, with_values(cudnn, benchmark=True), device.own_stream():
        yield


def _routes(ready: Ready, asked: Asked, *, captured: bool) -> list[str]:
    """Those that are captured come last, right before the race: what torch.compile records gives
    back the workspaces of cuBLAS.
    """
    routes = ROUTES[ready.device.place.type]
    return [name for name in asked.race.names(ready.device) if routes[name].captured == captured]


def errors(name: str, asked: Asked) -> Row:
    """How far the outputs of the module that raced and of eager are from float64, as a part of
    their size; the worst of each.
    """
    ready = _READY[name]
    (module, x), tuned = ready.last, ready.tuned
    if tuned is None:
        return {"verdict": "failed", "reason": "it did not race"}
    wide = x.double() if x.is_floating_point() else x
    with turn(), torch.no_grad():
        exact = _flat(copy.deepcopy(module).double()(wide))
        found = {"plantune": _flat(tuned(x)), "eager": _flat(module(x))}
    distances = {
        name: max(_distance(y, e) for y, e in zip(ys, exact, strict=True))
        for name, ys in found.items()
    }
    return {"verdict": "known", "distances": distances}


def _flat(made: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]


def _distance(y: Tensor, exact: Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


def _compiler_takes_turns() -> None:
    """Where torch's compiler times kernels of its own on a GPU."""
    from torch._inductor.runtime import benchmarking

    for kind in filter(inspect.isclass, vars(benchmarking).values()):
        timed = vars(kind).get("benchmark_gpu")
        if timed is not None and not hasattr(timed, "takes_turns"):
            kind.benchmark_gpu = _in_turn(timed)


def _in_turn(timed: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(timed)
    def waiting(*args: Any, **kwargs: Any) -> Any:
        with turn():
            return timed(*args, **kwargs)

    waiting.takes_turns = True
    return waiting


def _made(ready: Ready, asked: Asked, route: str) -> tuple[dict[str, Runnable], dict[str, str]]:
    return rivals_of((ready.module, ready.x), ready.last, asked.mode, [route], ready.device)


def _in_time(until: float, make: Callable[[], Any]) -> Any:
    """What it makes, or nothing; it may take a second to notice."""

    def stop(number: int, frame: object) -> None:
        raise TimeUp

    signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(until - time.monotonic(), 0.01), AGAIN_S)
        try:
            return make()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except TimeUp:
        return {}, {}


@contextmanager
def on_cores(part: slice) -> Iterator[None]:
    """This thread and what it starts, where there are many."""
    before = os.sched_getaffinity(0)
    if len(OWN) >= MANY:
        os.sched_setaffinity(0, OWN[part])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
