"""How fast a network is: without a plan, and with one that a search found, beside the framework.

A race of tuned networks begins with a search (`searched`), which leaves its plan in the cache.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import networks
import torch
from asked import Asked, Row
from timing import as_raced, compile_kernels, ratios
from torch import Tensor, nn
from turns import prepare_elsewhere

from plantune import optimize
from plantune.devices.machine import environment_of
from plantune.errors import UnsupportedModule
from plantune.measure.worker.turns import turn
from plantune.plans.plan import Plan
from plantune.tuning import reporting, search_for, sought_for

# Those that may run a network in place of its plan, by the kind of device.
OWN_RACE = {"cuda": ("eager-channels-last", "cuda-graph"), "cpu": ("eager", "eager-channels-last")}
FURTHEST = 10


def without_plan(name: str, asked: Asked) -> Row:
    """`optimize` beside the framework's routes, at the network's own image size."""
    prepare_elsewhere()
    module, x = _called(name, asked)
    if asked.device == "cuda":
        arch = environment_of(torch.device("cuda", 0)).arch
        found = _unless_refused(lambda: compile_kernels(module, x, asked.mode, arch))
        if found is not None:
            return found
    return _raced("timed", module, x, asked)


def prepared(name: str, asked: Asked) -> Row:
    """Imports and loads what a search needs, before its time begins."""
    prepare_elsewhere()
    module, x = on_its_device(name, asked)
    optimize(module, x, mode=asked.mode, fallback="silent")
    return {"verdict": "prepared"}


def searched(name: str, asked: Asked) -> Row:
    """What `tune` does: the plan is stored. Its own race leaves out what torch.compile makes, for
    which the search would have to wait: that races afterwards.
    """
    prepare_elsewhere()
    module, x = as_raced(*on_its_device(name, asked))
    began = time.monotonic()
    sought, device = sought_for(optimize(module, x, mode=asked.mode, fallback="silent"))
    with reporting(True) as report:
        found = search_for(
            sought, device, asked.budget_s, report=report, routes=OWN_RACE[device.type]
        )
    result, plan = found.result, found.plan
    row = {"verdict": "searched", "budget_s": asked.budget_s, "origin": plan.written_origin}
    row |= {"search_s": round(time.monotonic() - began, 1), "stored": found.stored}
    for key in ("measured", "rejected", "candidates", "exhausted"):
        row[key] = getattr(result, key)
    row["phases_s"] = {phase: round(s, 1) for phase, s in result.stages_s.items()}
    told = {key: plan.evidence.get(key) for key in ("ratio", "baseline", "median_ms")}
    return {**row, **told, "steps": steps_of(plan)}


def steps_of(plan: Plan) -> dict[str, Any]:
    """The sums of the steps that were measured, and the ten of them that are furthest, in all, from
    what arithmetic and traffic take: in microseconds, with that roofline and its kernel.
    """
    known = [(choice, choice.times) for choice in plan.choices if choice.times is not None]
    far = sorted(known, key=lambda pair: pair[1].roofline_us - pair[1].us)[:FURTHEST]
    return {
        "known": len(known),
        "of": len(plan.choices),
        "us": round(sum(times.us for _, times in known), 1),
        "roofline_us": round(sum(times.roofline_us for _, times in known), 1),
        "furthest": [
            (choice.nodes[0], choice.candidate.family, times.us, times.roofline_us)
            for choice, times in far
        ],
    }


def _called(name: str, asked: Asked) -> tuple[nn.Module, Tensor]:
    """On the CPU, in the dtype in which it runs."""
    module = networks.build(name).to(dtype=asked.dtype).train(asked.mode == "train")
    x = networks.call_of(name)
    return module, x.to(asked.dtype) if x.is_floating_point() else x


def on_its_device(name: str, asked: Asked) -> tuple[nn.Module, Tensor]:
    """As it is called, with statistics of the images in its norms."""
    module, x = networks.build(name).to(asked.device), networks.call_of(name).to(asked.device)
    with turn():
        networks.settle(module, x)
    module = module.to(asked.dtype).train(asked.mode == "train")
    return module, x.to(asked.dtype) if x.is_floating_point() else x


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
