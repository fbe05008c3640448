"""What a worker process can be asked for: its client names one of these, with the arguments.

An expected failure of a candidate is its outcome; anything else is raised, in the client too.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, get_type_hints

import torch

from plantune.base.jsonable import from_json, to_json
from plantune.base.outcome import Measured, Outcome, Rejected
from plantune.devices.gpus import device_for, later_gpu
from plantune.errors import BuildError, UnsupportedDevice
from plantune.graph import Graph, Step, TensorType
from plantune.graph.builder import GraphBuilder
from plantune.graph.partition import partition_into
from plantune.kernels.build import build
from plantune.kernels.family import Candidate
from plantune.kernels.registry import candidates, resolve, resolve_legal
from plantune.kernels.resolved import ResolvedStep
from plantune.measure import programs, roofline, scenes
from plantune.measure.limits import attempted, rejection
from plantune.measure.numerics import check_resolved
from plantune.measure.programs import PassCost, Say, time_programs
from plantune.measure.racing.race import race
from plantune.measure.scenes import Scenes
from plantune.measure.step_alone import TimedStep
from plantune.measure.timing import Effort, Timing, time_call
from plantune.measure.watches import Watch, kernel_watch
from plantune.plans.plan import Plan
from plantune.space.arch import load_arch
from plantune.space.search_space import SearchSpace, load_search_space

P = ParamSpec("P")
T = TypeVar("T")
# Beyond this the median means nothing, whatever else ran on the machine.
HOPELESS_SPREAD = 1.0
LARGEST = sys.float_info.max
EMPTY = Rejected("numerics", "its results have no elements, so there is nothing to compare")
CROWDED = Rejected("noisy", "other work or heat slowed the machine down; measure on an idle one")


def check_and_time(
    say: Say, step: Step, candidate: Candidate, arch: str, effort: Effort, seeds: tuple[int, ...]
) -> Outcome:
    """Builds a candidate, checks it with each seed, then times it."""
    space = load_search_space(arch)
    chosen = resolve_legal(step, candidate, space)
    if not any(type_.numel for _, type_ in step.outputs):
        return EMPTY
    found = attempted(lambda: _outcome(say, chosen, space, effort, seeds))
    if isinstance(found, Rejected) and found.stage == "crash" and device_for(space.arch).works():
        return Rejected("build", found.reason)  # the driver refused to launch it
    return found


def build_ahead(say: Say, step: Step, candidate: Candidate, arch: str) -> Rejected | None:
    """Builds a candidate for another process, which finds what was compiled in the cache."""
    say("build")
    try:
        build(resolve(step, candidate), load_arch(arch))
    except BuildError as error:
        return rejection(error)
    return None


def check_elsewhere(
    say: Say, step: Step, candidate: Candidate, arch: str, seeds: tuple[int, ...]
) -> Rejected | None:
    """Checks a candidate of an arch that is not here on a later GPU; see `Worker`."""
    space = load_search_space(arch)
    device = later_gpu(space.arch)
    if device is None:
        raise UnsupportedDevice(f"no GPU here is later than {arch}")

    def run() -> None:
        say("build")
        chosen = resolve_legal(step, candidate, space)
        chosen.family.build_portable(chosen.parts, chosen.config, space.arch)
        say("check")
        for seed in seeds:
            check_resolved(chosen, space.arch, seed, device)

    return attempted(run)


def pass_cost(say: Say, graph: Graph, plan: Plan, runs: int, seed: int) -> PassCost | Rejected:
    """See `programs.pass_cost`."""
    say("build")
    device = device_for(load_arch(plan.problem.arch))
    return attempted(lambda: programs.pass_cost(graph, plan, runs, seed), device)


def rooflines(say: Say, steps: tuple[Step, ...], arch: str) -> list[float]:
    """The least that each step can take here; see `roofline.step_us`."""
    say("time")
    device = device_for(load_arch(arch))
    return [roofline.step_us(step, device) for step in steps]


def warm_up(say: Say, arch: str) -> None:
    """Loads what the first candidate would wait for: the driver's context, cuDNN, and whatever
    references, checks and clocks run.
    """
    device = device_for(load_arch(arch))
    image = torch.ones(1, 8, 8, 8, device=device.place)
    torch.conv2d(image, image)
    device.synchronize()
    for step, candidate in small_candidates(load_search_space(arch)):
        check_and_time(lambda stage: None, step, candidate, arch, Effort(0.005, 0.0), (0,))


def small_candidates(space: SearchSpace) -> list[tuple[Step, Candidate]]:
    """The framework's candidates for a small convolution, a function and a product."""
    dtype = "float16" if space.arch.kind == "cuda" else "float32"
    builder = GraphBuilder()
    image = builder.input("x", TensorType((2, 16, 8, 8), dtype))
    weight = builder.parameter("weight", TensorType((16, 16, 3, 3), dtype))
    geometry: dict[str, Any] = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    (image,) = builder.emit("conv2d", image, weight, groups=1, **geometry)
    (image,) = builder.emit("relu", image)
    (rows,) = builder.emit("mean", image, dims=(2, 3), keepdim=False)
    square = builder.parameter("square", TensorType((16, 16), dtype))
    (rows,) = builder.emit("matmul", rows, square, transpose_a=False, transpose_b=False)
    graph = builder.build((rows,))
    steps = partition_into(graph, [(node.name,) for node in graph.nodes])
    return [(step, candidates(step, space, ("framework",))[0]) for step in steps]


OF_CANDIDATES = (check_and_time, build_ahead, check_elsewhere, rooflines, warm_up)
OF_PROGRAMS = (time_programs, pass_cost, race)
WORK: Mapping[str, Callable[..., Any]] = {
    work.__name__: work for work in (*OF_CANDIDATES, *OF_PROGRAMS)
}


@dataclass(frozen=True)
class Request(Generic[T]):
    """A call of one of these, to be sent to a worker."""

    work: Callable[..., T]
    arguments: Mapping[str, Any]

    def message(self, memory_bytes: int | None = None) -> dict[str, Any]:
        """`memory_bytes` is what it may allocate."""
        arguments = {name: to_json(value) for name, value in self.arguments.items()}
        return {"do": self.work.__name__, "with": arguments, "memory_bytes": memory_bytes}

    def result(self, answer: Any) -> T:
        found: T = from_json(get_type_hints(self.work)["return"], answer)
        return found


def request(
    work: Callable[Concatenate[Say, P], T], *args: P.args, **kwargs: P.kwargs
) -> Request[T]:
    """A call of `work` with these arguments."""
    _, *names = inspect.signature(work).parameters
    return Request(work, {**dict(zip(names, args, strict=False)), **kwargs})


def perform(message: Mapping[str, Any], say: Say) -> Any:
    """The answer to a request's message, as JSON too."""
    work = WORK[message["do"]]
    if work in OF_PROGRAMS:
        scenes.forget()  # whole programs need the memory
    types = get_type_hints(work)
    arguments = {name: from_json(types[name], data) for name, data in message["with"].items()}
    return to_json(work(say, **arguments))


def _outcome(
    say: Say, chosen: ResolvedStep, space: SearchSpace, effort: Effort, seeds: tuple[int, ...]
) -> Outcome:
    step = chosen.step
    say("build")
    build(chosen, space.arch)
    say("check")
    reports = [check_resolved(chosen, space.arch, seed) for seed in seeds]
    say("time")
    device = device_for(space.arch)
    with device.own_stream(), torch.no_grad():
        known = Scenes(step, device, seeds[0])
        timed = TimedStep(chosen, space.arch, known.named(known.first().inputs))
        watch = kernel_watch(device)
        timing = _possible(timed, chosen, effort, watch)
    if isinstance(timing, Rejected):
        return timing
    worst = max(reports, key=lambda report: report.error / max(report.bound, sys.float_info.min))
    return Measured(
        median_us=timing.median_us,
        low_us=timing.low_us,
        high_us=timing.high_us,
        samples=timing.samples,
        error=min(worst.error, LARGEST),
        bound=min(worst.bound, LARGEST),
        deterministic=all(report.deterministic for report in reports),
        cache=watch.cache,
    )


def _possible(
    timed: TimedStep, chosen: ResolvedStep, effort: Effort, watch: Watch
) -> Timing | Rejected:
    """The kernel's time, unless no kernel can be that fast or nothing can be said of it."""
    call, launches = timed.repeated(lambda call: watch.batch_us(call, 1))
    least = 0.0
    for _ in range(2):
        timing = time_call(call, effort, watch).per(launches)
        least = roofline.least_us(chosen, timed.device)
        if timing.median_us >= least:
            break
        if timing.shared:
            return CROWDED
        roofline.look_again()
    else:
        text = f"{timing.median_us:.3g} us is less than any kernel can take here, {least:.3g} us"
        return Rejected("roofline", text)
    if timing.shared:
        return CROWDED
    if timing.spread > HOPELESS_SPREAD:
        return Rejected("noisy", f"quartiles {timing.low_us:.3g} and {timing.high_us:.3g} us")
    return timing
