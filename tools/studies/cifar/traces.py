"""Where the time of a variant's steps goes: by torch's profiler, and by Python's."""

from __future__ import annotations

import cProfile
import io
import json
import pstats
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from batches import Batch
from race import call_of
from training import Trained

from plantune.report.tables import table

STEPS, MOST = 5, 25


def profiled(trained: Trained, batch: Batch, out: Path) -> str:
    """Writes a Chrome trace of some steps, and their operators as JSON; these are also a table."""
    name, call = trained.variant.name, call_of(trained, batch)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if batch[0].is_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    call()
    with torch.profiler.profile(activities=activities) as profile:
        _steps(call, batch)
    profile.export_chrome_trace(str(out / f"{name}.trace.json"))
    rows = [_row(event) for event in profile.key_averages()]
    rows.sort(key=lambda row: max(row["gpu_us"], row["host_us"]), reverse=True)
    text = json.dumps({"variant": name, "steps": STEPS, "operators": rows}, indent=1)
    (out / f"{name}.profile.json").write_text(text + "\n", encoding="utf-8")
    lines = [
        (r["operator"][:60], f"{r['calls']:.1f}", f"{r['host_us']:.0f}", f"{r['gpu_us']:.0f}")
        for r in rows[:MOST]
    ]
    return table((f"{name}, a step", "calls", "host us", "GPU us"), lines, "lrrr")


def _row(event: Any) -> dict[str, Any]:
    return {
        "operator": event.key,
        "calls": event.count / STEPS,
        "host_us": event.self_cpu_time_total / STEPS,
        "gpu_us": event.self_device_time_total / STEPS,
    }


def python_profiled(trained: Trained, batch: Batch, out: Path) -> str:
    """Writes what Python's functions take in some steps, for `pstats`; the largest as text."""
    call = call_of(trained, batch)
    call()
    profile = cProfile.Profile()
    with profile:
        _steps(call, batch)
    profile.dump_stats(out / f"{trained.variant.name}.pstats")
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("cumulative").print_stats(MOST)
    return text.getvalue()


def _steps(call: Callable[[], None], batch: Batch) -> None:
    for _ in range(STEPS):
        call()
    if batch[0].is_cuda:
        torch.cuda.synchronize()
