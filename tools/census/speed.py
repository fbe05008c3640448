"""How fast a network is: without a plan, and with one that a search found, beside the framework.

A race of tuned networks is three measures, so that what takes long happens beside each other: the
framework's compilers run in many processes (`compiled`), a search has a GPU for itself
(`searched`), and the race (`tuned`) finds what both left in their caches.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import networks
import torch
from asked import Asked, Row
from timing import as_raced, compile_kernels, ratios, rivals_of
from torch import Tensor, nn
from turns import prepare_elsewhere

from plantune import tune
from plantune.cuda.flags import cudnn
from plantune.errors import UnsupportedModule
from plantune.gpus import device_for
from plantune.machine import environment_of
from plantune.scopes import with_values
from plantune.space.arch import load_arch


def without_plan(name: str, asked: Asked) -> Row:
    """`optimize` beside the framework's ways, at the network's own image size."""
    prepare_elsewhere()
    module, x = _called(name, asked)
    if asked.device == "cuda":
        arch = environment_of(torch.device("cuda", 0)).arch
        found = _unless_refused(lambda: compile_kernels(module, x, asked.mode, arch))
        if found is not None:
            return found
    return _raced("timed", module, x, asked)


def compiled(name: str, asked: Asked) -> Row:
    """Compiles what the rivals of a race compile, and leaves it in their caches."""
    module, x = on_its_device(name, asked)
    device = device_for(load_arch(environment_of(x.device).arch))
    last, seconds, failures = as_raced(module, x), {}, {}
    with torch.set_grad_enabled(asked.mode == "train"), with_values(cudnn, benchmark=True):
        for way in asked.race.names(device):
            began = time.monotonic()
            _, failed = rivals_of((module, x), last, asked.mode, [way], device)
            failures |= failed
            seconds[way] = round(time.monotonic() - began, 1)
    return {"verdict": "compiled", "compile_s": seconds, "failures": failures}


def searched(name: str, asked: Asked) -> Row:
    """`tune`, as a user calls it: the plan is stored."""
    module, x = as_raced(*on_its_device(name, asked))
    began = time.monotonic()
    tuned = tune(module, x, budget=asked.budget_s, mode=asked.mode, fallback="silent")
    seconds = round(time.monotonic() - began, 1)
    evidence = dict(tuned.stock().plan.evidence)
    told = {key: evidence.get(key) for key in ("ratio", "baseline")}
    row = {"verdict": "searched", "budget_s": asked.budget_s, "search_s": seconds}
    return {**row, "origin": tuned.stock().plan.origin, **told}


def tuned(name: str, asked: Asked) -> Row:
    """`optimize` with the plan that `searched` left."""
    row = _raced("timed", *_called(name, asked), asked)
    if row.get("origin") == "default":
        return {**row, "verdict": "no plan"}
    return row


def _called(name: str, asked: Asked) -> tuple[nn.Module, Tensor]:
    """On the CPU, in the dtype in which it runs."""
    module = networks.build(name).to(dtype=asked.dtype).train(asked.mode == "train")
    x = networks.call_of(name)
    return module, x.to(asked.dtype) if x.is_floating_point() else x


def on_its_device(name: str, asked: Asked) -> tuple[nn.Module, Tensor]:
    module, x = _called(name, asked)
    return module.to(asked.device), x.to(asked.device)


def _raced(verdict: str, module: nn.Module, x: Tensor, asked: Asked) -> Row:
    row: Row = {"image": x.shape[-1], "batch": x.shape[0], "verdict": verdict}
    own, images = copy.deepcopy(module).to(asked.device), x.to(asked.device)
    refused = _unless_refused(lambda: row.update(ratios(own, images, asked.mode, asked.race)))
    return row if refused is None else {**row, **refused}


def _unless_refused(run: Callable[[], object]) -> Row | None:
    try:
        run()
    except UnsupportedModule as error:
        return {"verdict": "refused", "reason": str(error)}
    return None
