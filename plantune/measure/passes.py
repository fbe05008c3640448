"""What a pass of a program costs: time of the host, time of the GPU, kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from plantune.device import Device
from plantune.gpus import device_for
from plantune.graph.graph import Graph
from plantune.measure.gpu_watch import kernel_watch
from plantune.measure.timing import HOST, Call, Timing
from plantune.measure.whole import draw_values, pass_that_runs
from plantune.plan import Plan, check_plan
from plantune.runtime.schedule import make_schedule
from plantune.space.search_space import SearchSpace, load_search_space

WARM_UP_CALLS = 2


@dataclass(frozen=True)
class PassCost:
    """`cpu` is the time until a call returns; on a GPU, that for starting it. `gpu` is None on a
    CPU.
    """

    cpu: Timing
    gpu: Timing | None
    kernels: int


def pass_cost(graph: Graph, plan: Plan, runs: int, seed: int = 0) -> PassCost:
    """The cost of one pass of a plan on random data, in so many runs one by one."""
    space = load_search_space(plan.arch)
    device = device_for(space.arch)
    call = pass_that_runs(graph, plan, draw_values(graph, seed, device), device)
    for _ in range(WARM_UP_CALLS):
        call()
    cpu = Timing(tuple(_host_us(call, device) for _ in range(runs)))
    if not device.captures:
        return PassCost(cpu, None, launches(graph, plan, space))
    watch = kernel_watch(device)
    gpu = Timing(tuple(watch.batch_us(call, 1) for _ in range(runs)))
    return PassCost(cpu, gpu, _kernels(call, device) or launches(graph, plan, space))


def _host_us(call: Call, device: Device) -> float:
    device.synchronize()
    return HOST.batch_us(call, 1)


def launches(graph: Graph, plan: Plan, space: SearchSpace) -> int:
    """What a pass starts: steps that are no mere views, and conversions of layouts."""
    schedule = make_schedule(graph, plan, check_plan(plan, graph, space))
    passes = [launch for launch in schedule.launches if launch.step.phase != "refresh"]
    return sum(
        len(launch.conversions) + (len(launch.aliases) < len(launch.step.outputs))
        for launch in passes
    )


def _kernels(call: Call, device: Device) -> int:
    """What the GPU ran in one call, as torch's profiler saw it; 0 where it may not look."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        call()
        device.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    return sum(event.device_type == on_gpu for event in seen.events() or ())
