"""What a call of a tuned module costs and keeps, as no bench shows it: beside its own twins.

    python tools/studies/calls.py            # on a GPU: the networks of the README and ResNet-50
    python tools/studies/calls.py --small    # tiny, on the CPU

For each network, with random weights, in turns in one process: calls in a row on one input, on 64
inputs in turns, with `frozen=True`, and with filters that are not in channels_last. Then what the
host needs for a call and the GPU for a pass, how late single calls are beside bare replays of the
same graph, and whether anything was captured, built or kept after the third call. Each way is
compared with float64 first. Prints one JSON object a network as it is done.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

import plantune
from plantune.base.paths import cache_folder
from plantune.devices.device import Device
from plantune.devices.gpus import device_for
from plantune.devices.machine import environment_of
from plantune.measure.racing.latency import gpu_us, host_us
from plantune.measure.subject import Raced, Subject
from plantune.measure.timing import Effort, Timing, ratio_interval, time_interleaved
from plantune.measure.watches import call_watch
from plantune.plans.workload import Workload
from plantune.runtime.module import TunedModule
from plantune.space.arch import load_arch

SAME, TURNS, FROZEN, PACKED = "same input", "inputs in turns", "frozen", "packed in the pass"
PERCENTS = (50, 99, 99.9, 100)
BLOCK = 50  # single calls before those of the other way
LATE_PART = 2  # single calls get so many times the seconds of those in a row


@dataclass(frozen=True)
class Sizes:
    """Networks with their batches, and how much of everything."""

    networks: tuple[tuple[str, int], ...] = (
        ("se_resnet9_fixup", 128),
        ("se_resnet9_fixup", 1),
        ("resnet50", 32),
        ("resnet18", 16),
        ("resnet18", 64),
        ("se_resnet9_fixup", 32),
        ("se_resnet9_fixup", 1024),
    )
    inputs: int = 64
    seconds: float = 2.0
    calls: int = 10_000
    changes: int = 1_000
    image_size: int | None = None  # the network's own


SMALL = Sizes(
    (("se_resnet9_fixup", 1),), inputs=3, seconds=0.01, calls=20, changes=5, image_size=16
)


@dataclass
class Studied:
    """A network on a device: the ways to call it, and its inputs."""

    workload: Workload
    device: Device
    live: TunedModule
    frozen: TunedModule
    packed: TunedModule
    images: list[Tensor]

    @staticmethod
    def of(workload: Workload, count: int) -> Studied:
        device = device_for(load_arch(workload.arch))
        subject = Subject(Raced(workload.problem), device.place)
        generator = device.generator(0)
        images = [subject.inputs(generator)[0] for _ in range(count)]
        nchw = subject.module
        nhwc = deepcopy(nchw).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        live, frozen, packed = (
            plantune.optimize(module, images[0], frozen=frozen, fallback="silent")
            for module, frozen in ((nhwc, False), (nhwc, True), (nchw, False))
        )
        return Studied(workload, device, live, frozen, packed, images)

    def ways(self) -> dict[str, Callable[[], object]]:
        turns, image = cycle(self.images), self.images[0]
        ways: dict[str, Callable[[], object]] = {
            SAME: lambda: self.live(image),
            TURNS: lambda: self.live(next(turns)),
            FROZEN: lambda: self.frozen(image),
        }
        if self.device.captures:  # a CPU keeps its own copies of filters
            ways[PACKED] = lambda: self.packed(image)
        return ways


def studied(workload: Workload, sizes: Sizes) -> dict[str, Any]:
    subject = Studied.of(workload, sizes.inputs)
    modules = (subject.live, subject.frozen, subject.packed)
    errors = [plantune.check(tuned, subject.images[0]).error for tuned in modules]
    told = {
        "workload": workload.to_json(),
        "environment": environment_of(subject.device.place).to_json(),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "plan": {"origin": subject.live.plan.written_origin, "runner": subject.live.plan.route},
        "how": subject.live.last_call().how,
        "errors": errors,
    }
    found = {**told, **in_turns(subject, sizes)}
    if subject.device.captures:
        found |= sides(subject)
    return found | {"late": late(subject, sizes), "grown": grown(subject, sizes)}


def in_turns(subject: Studied, sizes: Sizes) -> dict[str, Any]:
    """Calls in a row, each way by the live one on the same input."""
    ways, effort = subject.ways(), Effort(sizes.seconds, tolerance=0.001)
    timed = time_interleaved(list(ways.values()), effort, call_watch(subject.device))
    own = timed[0]
    rows = {name: _row(timing, own) for name, timing in zip(ways, timed, strict=True)}
    return {"queued": rows, "inputs_in_turns": sizes.inputs}


def _row(timing: Timing, own: Timing) -> dict[str, Any]:
    ratio = ratio_interval(timing, own)
    times = {"median_us": timing.median_us, "low_us": timing.low_us, "high_us": timing.high_us}
    return {**times, "ratio": ratio.ratio, "interval": [ratio.low, ratio.high]}


def sides(subject: Studied) -> dict[str, Any]:
    """What a call of each way takes of the host and of the GPU, in us."""
    ways = subject.ways()
    hosts = host_us(list(ways.values()), subject.device)
    timed = zip(ways.items(), hosts, strict=True)
    gpus = {name: gpu_us(call, subject.device, host) for (name, call), host in timed}
    return {"host_us": dict(zip(ways, hosts, strict=True)), "gpu_us": gpus}


def late(subject: Studied, sizes: Sizes) -> dict[str, Any]:
    """Single calls until their result is there; on a GPU beside bare replays of the same graph."""
    ways = {name: way for name, way in subject.ways().items() if name in (SAME, TURNS)}
    if subject.device.captures:
        ways["bare replay"] = replay_of(ways[SAME], subject.device)
    watch = call_watch(subject.device)
    samples: dict[str, list[float]] = {name: [] for name in ways}
    end = time.monotonic() + LATE_PART * sizes.seconds
    for number in range(max(sizes.calls // BLOCK, 1)):
        if number and time.monotonic() > end:
            break
        for name, way in ways.items():
            way()
            samples[name] += [watch.batch_us(way, 1) for _ in range(min(BLOCK, sizes.calls))]
    return {name: _percentiles(Timing(tuple(taken))) for name, taken in samples.items()}


def _percentiles(timing: Timing) -> dict[str, float]:
    us = {f"p{percent:g}_us": timing.percentile_us(percent) for percent in PERCENTS}
    return {**us, "calls": timing.samples, "p99.9_by_p50": us["p99.9_us"] / us["p50_us"]}


def replay_of(way: Callable[[], object], device: Device) -> Callable[[], object]:
    with device.own_stream():
        way()
        return device.captured(way)


def grown(subject: Studied, sizes: Sizes) -> dict[str, Any]:
    """What is new after three calls and many others, with inputs that change and weights too."""
    tuned, draw = subject.live, random.Random(0)
    for image in subject.images[:3]:
        tuned(image)
    before = _kept(subject)
    with torch.no_grad():
        for _ in range(sizes.changes):
            tuned(draw.choice(subject.images))
            tuned(draw.choice(subject.images).clone())
            for parameter in draw.sample(list(tuned.parameters()), 3):
                parameter.mul_(1.001 if draw.random() < 0.5 else 1 / 1.001)
    after = _kept(subject)
    return {"calls": 2 * sizes.changes, **{name: after[name] - before[name] for name in before}}


def _kept(subject: Studied) -> dict[str, int]:
    subject.device.synchronize()
    stats = subject.live.stats()
    held = torch.cuda.memory_allocated(subject.device.place) if subject.device.captures else 0
    files = sum(1 for path in cache_folder().rglob("*") if path.is_file())
    return {
        "captures": stats.captures,
        "instances": stats.instances,
        "eager_calls": stats.eager,
        "held_bytes": stats.held_bytes,
        "allocated_bytes": held,
        "files_in_cache": files,
    }


def study(sizes: Sizes) -> Iterator[dict[str, Any]]:
    with torch.no_grad():
        for network, batch in sizes.networks:
            size = sizes.image_size
            workload = Workload.on(None, None, network=network, batch=batch, image_size=size)
            yield studied(workload, sizes)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="tiny, on the CPU")
    return parser.parse_args(argv)


if __name__ == "__main__":
    for told in study(SMALL if arguments().small else Sizes()):
        print(json.dumps(told), flush=True)
