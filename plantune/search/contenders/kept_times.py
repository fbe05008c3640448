"""What was measured of a plan's steps: their times, stored in the plan, and whether they repeat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from plantune.base.outcome import Measured, Outcome
from plantune.graph import Graph, Step
from plantune.kernels.family import Candidate
from plantune.plans.checked_plan import check_plan
from plantune.plans.plan import Plan
from plantune.plans.step_times import StepTimes
from plantune.search.costs import times_us
from plantune.space.search_space import SearchSpace

Outcomes = Mapping[tuple[str, Candidate], Outcome]


def with_times(
    plan: Plan,
    graph: Graph,
    space: SearchSpace,
    outcomes: Outcomes,
    rooflines: Callable[[Sequence[Step]], Sequence[float]],
) -> Plan:
    """The plan with the time, the roofline and the runner-up of each step that was measured."""
    measured = times_us(outcomes)
    steps = check_plan(plan, graph, space).of_pass
    chosen = [(each.step, each.candidate) for each in steps]
    known = [(step, c) for step, c in chosen if c in measured.get(step.signature, {})]
    least_us = rooflines([step for step, _ in known]) if known else ()
    times: dict[str, StepTimes] = {}
    for (step, candidate), roofline_us in zip(known, least_us, strict=True):
        others = dict(measured[step.signature])
        us = others.pop(candidate)
        runner_up = min(others.items(), key=lambda pair: pair[1], default=None)
        times[step.nodes[0].name] = StepTimes(us, roofline_us, runner_up)
    choices = tuple(replace(c, times=times.get(_first(c.nodes, times))) for c in plan.choices)
    return replace(plan, choices=choices)


def _first(nodes: Sequence[str], times: Mapping[str, StepTimes]) -> str:
    return next((name for name in nodes if name in times), "")


def is_deterministic(
    plan: Plan,
    graph: Graph,
    space: SearchSpace,
    outcomes: Outcomes,
) -> bool:
    """Whether each kernel of a pass gave the same bits whenever it was checked."""
    steps = check_plan(plan, graph, space).of_pass
    found = [outcomes.get((each.step.signature, each.candidate)) for each in steps]
    return all(isinstance(outcome, Measured) and outcome.deterministic for outcome in found)
