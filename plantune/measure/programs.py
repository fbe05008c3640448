"""Times whole programs: in turns, as a kernel that wins alone may lose among the others, or a pass
of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from plantune.base.outcome import Rejected
from plantune.devices.device import CPU, Device, Runnable, framework_alone
from plantune.devices.gpus import device_for
from plantune.graph import Graph, Step
from plantune.graph.layouts import in_layout
from plantune.kernels.family import Values
from plantune.measure.inputs import draw_inputs
from plantune.measure.limits import attempted, rejection
from plantune.measure.timing import Effort, Timing, time_interleaved
from plantune.measure.watches import HOST, call_watch, kernel_watch
from plantune.plans.checked_plan import CheckedPlan, check_plan
from plantune.plans.plan import Plan
from plantune.runtime.captured.captured_program import CapturedProgram, program_on
from plantune.runtime.program.program import Program
from plantune.runtime.program.schedule import make_schedule
from plantune.runtime.proof.cases import evaluated
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

Say = Callable[[str], None]
WARM_UP_CALLS = 2
NO_TIME = "there was no time left for it"


def time_programs(
    say: Say, graph: Graph, plans: tuple[Plan, ...], effort: Effort, seed: int
) -> list[Timing | Rejected]:
    """The time of one pass of each plan, backward included where the graph has it.

    All run on the same random weights and inputs. A plan that does not build, or whose turn comes
    after the effort's `until`, is rejected and the others are timed.
    """
    if not plans:
        return []
    device = device_for(load_arch(plans[0].problem.arch))
    values = draw_values(graph, seed, device)
    prepared: list[Runnable | Rejected] = []
    for plan in plans:
        if prepared and effort.is_over:
            prepared.append(Rejected("timeout", NO_TIME))
            continue
        say("build")
        prepared.append(attempted(partial(_checked_pass, graph, plan, values, device), device))
    device.give_back_memory()  # as other work in a process may at any time
    say("time")
    calls = [call for call in prepared if not isinstance(call, Rejected)]
    timings = iter(time_interleaved(calls, effort, call_watch(device)) if calls else ())
    return [item if isinstance(item, Rejected) else next(timings) for item in prepared]


def _checked_pass(graph: Graph, plan: Plan, values: Values, device: Device) -> Runnable:
    checked = check_plan(plan, graph, load_search_space(plan.problem.arch))
    return pass_that_runs(checked, values, device)


def pass_that_runs(checked: CheckedPlan, values: Values, device: Device) -> Runnable:
    """A pass that has run once: what does not run at all is not timed."""
    call = one_pass(program_on(device.place, checked), values)
    try:
        call()
        device.synchronize()
    except Exception as error:
        if rejection(error) is None:  # The ops themselves may refuse random numbers.
            with framework_alone():
                evaluated(checked.graph, values)
        raise
    return call


def one_pass(program: Program | CapturedProgram, values: Values) -> Runnable:
    """A program with its weights prepared, as a call."""
    graph = program.graph
    program.refresh(values)
    inputs = [values[name] for name, _ in graph.inputs]
    gradients = [values[name] for name, _ in graph.output_gradients]
    if graph.backward_from is None:
        return lambda: program.forward(*inputs)

    def both() -> None:
        program.refresh(values)  # as after an optimizer's step
        program.forward(*inputs)
        program.backward(*gradients, again=False)
        program.forget()

    return both


def draw_values(graph: Graph, seed: int, device: Device = CPU) -> dict[str, Tensor]:
    """Random weights, inputs and gradients of outputs for a graph, in the layouts of its edge."""
    sources = tuple(graph.sources)
    outputs = tuple((name, graph.types[name]) for name in graph.outputs)
    whole = Step(graph.nodes, sources, outputs, graph.constants, "forward")
    drawn = draw_inputs(whole, device.generator(seed))
    return {
        name: in_layout(drawn[name], type_.layout) if len(type_.shape) == 4 else drawn[name]
        for name, type_ in sources
    }


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
    space = load_search_space(plan.problem.arch)
    device = device_for(space.arch)
    checked = check_plan(plan, graph, space)
    call = pass_that_runs(checked, draw_values(graph, seed, device), device)
    for _ in range(WARM_UP_CALLS):
        call()
    cpu = Timing(tuple(_host_us(call, device) for _ in range(runs)))
    if not device.captures:
        return PassCost(cpu, None, launches(checked))
    watch = kernel_watch(device)
    gpu = Timing(tuple(watch.batch_us(call, 1) for _ in range(runs)))
    return PassCost(cpu, gpu, _kernels(call, device) or launches(checked))


def _host_us(call: Runnable, device: Device) -> float:
    device.synchronize()
    return HOST.batch_us(call, 1)


def launches(checked: CheckedPlan) -> int:
    """What a pass starts: steps other than views, and conversions of layouts."""
    schedule = make_schedule(checked)
    passes = [launch for launch in schedule.launches if launch.step.phase != "refresh"]
    return sum(
        len(launch.conversions) + (len(launch.aliases) < len(launch.step.outputs))
        for launch in passes
    )


def _kernels(call: Runnable, device: Device) -> int:
    """What the GPU ran in one call, as torch's profiler saw it; 0 if it may not look."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        call()
        device.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    return sum(event.device_type == on_gpu for event in seen.events() or ())
