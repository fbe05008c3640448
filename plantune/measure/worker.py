"""The process in which candidates run: `python -m plantune.measure.worker FD_IN FD_OUT THREADS`.

It answers one request after the other, says at which stage it is, and may be killed at any time. An
expected failure of a candidate is its outcome; anything else goes back as an error.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch

from plantune.errors import IllegalCandidate, PlantuneError, ProtocolError
from plantune.graph.graph import Graph
from plantune.graph.step import Step
from plantune.kernels.build import build
from plantune.kernels.family import Candidate
from plantune.kernels.registry import why_not
from plantune.measure import roofline
from plantune.measure.bound import BoundStep
from plantune.measure.limits import (
    die_with_parent,
    leave_interrupts_to_parent,
    leave_no_core,
    memory_limit,
    rejection,
)
from plantune.measure.numerics import check
from plantune.measure.outcome import Measured, Outcome, Rejected, outcome_to_json
from plantune.measure.protocol import Channel, Message
from plantune.measure.race import Workload, race
from plantune.measure.timing import Effort, Timing, time_call
from plantune.measure.whole import time_programs
from plantune.plan import plan_from_json
from plantune.space.search_space import SearchSpace, load_search_space

Say = Callable[[str], None]
# Beyond this the median means nothing, whatever else ran on the machine.
HOPELESS_SPREAD = 1.0
LARGEST = sys.float_info.max


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
        outcome = rejected
    return {"outcome": outcome_to_json(outcome)}


def _outcome(
    step: Step, candidate: Candidate, space: SearchSpace, request: Message, say: Say
) -> Outcome:
    say("build")
    build(step, candidate, space.arch)
    say("check")
    reports = [check(step, candidate, space, seed) for seed in request["seeds"]]
    say("time")
    with torch.no_grad():
        bound = BoundStep(step, candidate, space.arch, request["seeds"][0])
        timing = _possible(bound, step, candidate, Effort(**request["effort"]))
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
    bound: BoundStep, step: Step, candidate: Candidate, effort: Effort
) -> Timing | Rejected:
    """The kernel's time, unless no kernel can be that fast or nothing can be said of it."""
    least = 0.0
    for _ in range(2):
        timing = time_call(bound.launch, effort)
        least = roofline.least_us(step, candidate)
        if timing.median_us >= least:
            break
        roofline.forget()
    else:
        text = f"{timing.median_us:.3g} us is less than any kernel can take here, {least:.3g} us"
        return Rejected("roofline", text)
    if timing.shared:
        return Rejected("noisy", "other processes kept the cores busy; measure on an idle machine")
    if timing.spread > HOPELESS_SPREAD:
        return Rejected("noisy", f"quartiles {timing.low_us:.3g} and {timing.high_us:.3g} us")
    return timing


def _time_programs(request: Message, say: Say) -> Message:
    graph = Graph.from_json(request["graph"])
    plans = [plan_from_json(plan) for plan in request["plans"]]
    effort = Effort(**request["effort"])
    timed = time_programs(graph, plans, effort, request["seed"], say)
    return {
        "rows": [
            outcome_to_json(row) if isinstance(row, Rejected) else row.to_json() for row in timed
        ]
    }


def _race(request: Message, say: Say) -> Message:
    plan = None if request["plan"] is None else plan_from_json(request["plan"])
    workload, effort = Workload(**request["workload"]), Effort(**request["effort"])
    return race(workload, plan, request["baselines"], effort, request["seed"], say).to_json()


def _ping(request: Message, say: Say) -> Message:
    return {}


HANDLERS: Mapping[str, Callable[[Message, Say], Message]] = {
    "check_and_time": _check_and_time,
    "time_programs": _time_programs,
    "race": _race,
    "ping": _ping,
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
        with memory_limit(request["memory_bytes"]):
            return {"answer": HANDLERS[request["do"]](request, say)}
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
    try:
        serve(Channel(incoming, outgoing))
    except BrokenPipeError:
        return


if __name__ == "__main__":
    main()
