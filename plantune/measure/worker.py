"""The process in which candidates run: `python -m plantune.measure.worker FD_IN FD_OUT THREADS`.

It answers one request after the other, says at which stage it is, and may be killed at any time. An
expected failure of a candidate is its outcome; anything else goes back as an error.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch

from plantune.device import Device, first_line
from plantune.errors import (
    IllegalCandidate,
    PlantuneError,
    ProtocolError,
    UnsupportedDevice,
    WorkerDied,
)
from plantune.gpus import device_for, later_gpu
from plantune.graph.graph import Graph
from plantune.graph.step import Step
from plantune.kernels.build import build
from plantune.kernels.family import Candidate
from plantune.kernels.registry import family_named, why_not
from plantune.measure import roofline, scenes
from plantune.measure.bound import BoundStep
from plantune.measure.gpu_watch import kernel_watch
from plantune.measure.limits import (
    GPU_FAULTS,
    die_with_parent,
    leave_interrupts_to_parent,
    leave_no_core,
    memory_limit,
    rejection,
)
from plantune.measure.numerics import check
from plantune.measure.outcome import Measured, Outcome, Rejected, outcome_to_json
from plantune.measure.passes import pass_cost
from plantune.measure.protocol import Channel, Message
from plantune.measure.race import race
from plantune.measure.scenes import Scenes
from plantune.measure.timing import Effort, Timing, time_call
from plantune.measure.whole import time_programs
from plantune.plan import plan_from_json
from plantune.problem import Problem
from plantune.space.arch import load_arch
from plantune.space.search_space import SearchSpace, load_search_space

Say = Callable[[str], None]
# Beyond this the median means nothing, whatever else ran on the machine.
HOPELESS_SPREAD = 1.0
LARGEST = sys.float_info.max
CROWDED = Rejected("noisy", "other work or heat slowed the machine down; measure on an idle one")


def _check_and_time(request: Message, say: Say) -> Message:
    step, candidate = Step.from_json(request["step"]), Candidate.from_json(request["candidate"])
    space = load_search_space(request["arch"])
    reason = why_not(step, candidate, space)
    if reason is not None:
        raise IllegalCandidate(f"{candidate.family} at step {step.name!r}: {reason}")
    try:
        outcome = _outcome(step, candidate, space, request, say)
    except Exception as error:
        rejected = rejection(error)
        if rejected is None:
            raise
        refused = rejected.stage == "crash" and device_for(space.arch).works()
        outcome = Rejected("build", rejected.reason) if refused else rejected
    return {"outcome": outcome_to_json(outcome)}


def _build(request: Message, say: Say) -> Message:
    """Builds a candidate for another process, which finds what was compiled in the cache."""
    step, candidate = Step.from_json(request["step"]), Candidate.from_json(request["candidate"])
    try:
        build(step, candidate, load_arch(request["arch"]))
    except Exception as error:
        rejected = rejection(error)
        if rejected is None or rejected.stage != "build":
            raise
        return {"failure": rejected.reason}
    return {"failure": None}


def _check_elsewhere(request: Message, say: Say) -> Message:
    """Checks a candidate of an arch that is not here on a later GPU; see `Worker`."""
    step, candidate = Step.from_json(request["step"]), Candidate.from_json(request["candidate"])
    space = load_search_space(request["arch"])
    device = later_gpu(space.arch)
    if device is None:
        raise UnsupportedDevice(f"no GPU here is later than {space.arch.name}")
    try:
        say("build")
        family_named(candidate.family).build_portable(step, candidate.config, space.arch)
        say("check")
        for seed in request["seeds"]:
            check(step, candidate, space, seed, device)
    except Exception as error:
        rejected = rejection(error)
        if rejected is None:
            raise
        return {"outcome": outcome_to_json(rejected)}
    return {"outcome": None}


def _outcome(
    step: Step, candidate: Candidate, space: SearchSpace, request: Message, say: Say
) -> Outcome:
    say("build")
    build(step, candidate, space.arch)
    say("check")
    reports = [check(step, candidate, space, seed) for seed in request["seeds"]]
    say("time")
    device = device_for(space.arch)
    with device.own_stream(), torch.no_grad():
        known = Scenes(step, device, request["seeds"][0])
        bound = BoundStep(step, candidate, space.arch, known.named(known.first().inputs))
        timing = _possible(bound, step, candidate, Effort(**request["effort"]), device)
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
    )


def _possible(
    bound: BoundStep, step: Step, candidate: Candidate, effort: Effort, device: Device
) -> Timing | Rejected:
    """The kernel's time, unless no kernel can be that fast or nothing can be said of it."""
    watch = kernel_watch(device)
    call, launches = bound.repeated(lambda call: watch.batch_us(call, 1))
    least = 0.0
    for _ in range(2):
        timing = time_call(call, effort, watch).per(launches)
        least = roofline.least_us(step, candidate, device)
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


def _time_programs(request: Message, say: Say) -> Message:
    scenes.forget()  # whole programs need the memory
    graph = Graph.from_json(request["graph"])
    plans = [plan_from_json(plan) for plan in request["plans"]]
    effort = Effort(**request["effort"])
    timed = time_programs(graph, plans, effort, request["seed"], say)
    return {
        "rows": [
            outcome_to_json(row) if isinstance(row, Rejected) else row.to_json() for row in timed
        ]
    }


def _pass_cost(request: Message, say: Say) -> Message:
    scenes.forget()  # whole programs need the memory
    graph, plan = Graph.from_json(request["graph"]), plan_from_json(request["plan"])
    say("build")
    try:
        return {"cost": pass_cost(graph, plan, request["runs"], request["seed"]).to_json()}
    except Exception as error:
        rejected = rejection(error)
        if rejected is None or not device_for(load_arch(plan.arch)).works():
            raise
        return {"rejected": outcome_to_json(rejected)}


def _race(request: Message, say: Say) -> Message:
    scenes.forget()  # whole programs need the memory
    plan = None if request["plan"] is None else plan_from_json(request["plan"])
    problem, effort = Problem(**request["problem"]), Effort(**request["effort"])
    baselines, seed, detailed = (request[key] for key in ("baselines", "seed", "detailed"))
    return race(problem, plan, baselines, effort, seed, say, detailed=detailed).to_json()


def _warm_up(request: Message, say: Say) -> Message:
    """Loads what the first candidate would wait for: the driver's context, cuDNN."""
    device = device_for(load_arch(request["arch"]))
    image = torch.ones(1, 8, 8, 8, device=device.place)
    torch.conv2d(image, image)
    device.synchronize()
    return {}


HANDLERS: Mapping[str, Callable[[Message, Say], Message]] = {
    "check_and_time": _check_and_time,
    "build": _build,
    "check_elsewhere": _check_elsewhere,
    "time_programs": _time_programs,
    "pass_cost": _pass_cost,
    "race": _race,
    "warm_up": _warm_up,
}


def serve(channel: Channel) -> None:
    """Answers requests until the parent closes its end."""
    channel.send({"ready": True, "threads": torch.get_num_threads()})
    while True:
        try:
            request = channel.receive()
        except (EOFError, ProtocolError):
            return
        number = request["id"]

        def say(stage: str, number: int = number) -> None:
            channel.send({"id": number, "stage": stage})

        channel.send({"id": number, **_answer(request, say)})


def _answer(request: Message, say: Say) -> Message:
    try:
        with memory_limit(request.get("memory_bytes")):
            return {"answer": HANDLERS[request["do"]](request, say)}
    except GPU_FAULTS as error:  # This process is of no more use.
        return {"error": _described(WorkerDied(first_line(error)))}
    except Exception as error:  # The parent raises it.
        return {"error": _described(error)}


def _described(error: Exception) -> Message:
    """An error of plantune's own with what it was made of, any other one with its trace."""
    plain = isinstance(error, PlantuneError) and all(
        isinstance(value, (str, int, float)) for value in error.args
    )
    args: list[Any] = list(error.args) if plain else []
    return {"type": type(error).__name__, "args": args, "trace": traceback.format_exc()[-8000:]}


def main() -> None:
    die_with_parent()
    leave_interrupts_to_parent()
    leave_no_core()
    incoming, outgoing, threads = map(int, sys.argv[1:])
    torch.set_num_threads(threads)
    gc.collect()
    gc.freeze()  # what was imported stays: looking at it again would take 0.05 s at each timing
    try:
        serve(Channel(incoming, outgoing))
    except BrokenPipeError:
        return


if __name__ == "__main__":
    main()
