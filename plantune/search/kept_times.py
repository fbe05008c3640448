"""Stores the measured times of a plan's steps in the plan, for everyone who gets it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from plantune.graph import Graph, Step
from plantune.kernels.family import Candidate
from plantune.outcome import Measured, Outcome
from plantune.plan import Plan, candidates_by_step, check_plan
from plantune.space.search_space import SearchSpace
from plantune.step_times import StepTimes

Outcomes = Mapping[tuple[str, Candidate], Outcome]


def with_times(
    plan: Plan,
    graph: Graph,
    space: SearchSpace,
    outcomes: Outcomes,
    rooflines: Callable[[Sequence[Step]], Sequence[float]],
) -> Plan:
    """The plan with the time, the roofline and the runner-up of each step that was measured."""
    steps = check_plan(plan, graph, space)
    chosen = candidates_by_step(plan, steps)
    measured = _by_signature(outcomes)
    known = [step for step in steps if chosen[step.name] in measured.get(step.signature, {})]
    times: dict[str, StepTimes] = {}
    for step, roofline_us in zip(known, rooflines(known) if known else (), strict=True):
        others = dict(measured[step.signature])
        us = others.pop(chosen[step.name])
        runner_up = min(others.items(), key=lambda pair: pair[1], default=None)
        times[step.nodes[0].name] = StepTimes(us, roofline_us, runner_up)
    choices = tuple(replace(c, times=times.get(_first(c.nodes, times))) for c in plan.choices)
    return replace(plan, choices=choices)


def _first(nodes: Sequence[str], times: Mapping[str, StepTimes]) -> str:
    return next((name for name in nodes if name in times), "")


def _by_signature(outcomes: Outcomes) -> dict[str, dict[Candidate, float]]:
    found: dict[str, dict[Candidate, float]] = {}
    for (signature, candidate), outcome in outcomes.items():
        if isinstance(outcome, Measured):
            found.setdefault(signature, {})[candidate] = outcome.median_us
    return found
