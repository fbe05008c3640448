"""Makes a plan for another shape of the same network fit this one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from plantune.errors import InvalidGraph, PlantuneError
from plantune.graph import Attrs, Graph, Step
from plantune.graph.partition import one_by_one, partition_into
from plantune.kernels.family import Candidate
from plantune.kernels.registry import candidates, estimate_us
from plantune.plans.checked_plan import check_plan
from plantune.plans.guess import framework_plan
from plantune.plans.plan import Choice, Plan
from plantune.plans.written_words import MEASURED, OF_FRAMEWORK
from plantune.search.contenders.of_covers import fallback
from plantune.space.search_space import SearchSpace


def fitted(plan: Plan, graph: Graph, space: SearchSpace) -> Plan | None:
    """The plan for another shape of the same network; None if nothing of it fits.

    A step whose candidate is not legal here gets the nearest config of its family, else the
    framework op by op.
    """
    if plan.problem.arch != space.arch.name:
        return None
    try:
        choices = tuple(_choices(plan, graph, space))
    except InvalidGraph:
        return None
    if OF_FRAMEWORK.issuperset(choice.candidate.family for choice in choices):
        return None
    plain = framework_plan(graph, space, network=plan.problem.network)
    made = replace(plain, choices=choices, origin=MEASURED, branches=plan.branches)
    with suppress(PlantuneError):
        check_plan(made, graph, space)
        return made
    return None


def _choices(plan: Plan, graph: Graph, space: SearchSpace) -> Iterator[Choice]:
    given = {choice.nodes: choice.candidate for choice in plan.choices}
    for step in partition_into(graph, _groups(given, graph)):
        names = tuple(node.name for node in step.nodes)
        candidate = _nearest(step, given.get(names), space)
        yield from [Choice(names, candidate)] if candidate else _one_by_one(step, graph, space)


def _groups(given: Iterable[Sequence[str]], graph: Graph) -> list[Sequence[str]]:
    """The groups of nodes that are all in the graph, then each other node alone."""
    known = {node.name for node in graph.nodes}
    groups = [group for group in given if known.issuperset(group)]
    rest = known.difference(*groups)
    return [*groups, *((node.name,) for node in graph.nodes if node.name in rest)]


def _nearest(step: Step, given: Candidate | None, space: SearchSpace) -> Candidate | None:
    """The given candidate if it is legal, else the one of its family that has most in common."""
    if given is None:
        return None
    legal = candidates(step, space, (given.family,))
    if given in legal:
        return given

    def closeness(candidate: Candidate) -> tuple[int, float]:
        return _in_common(candidate.config, given.config), -estimate_us(step, candidate)

    return max(legal, key=closeness, default=None)


def _in_common(one: Attrs, other: Mapping[str, object]) -> int:
    return sum(other.get(name) == value for name, value in one.items())


def _one_by_one(step: Step, graph: Graph, space: SearchSpace) -> Sequence[Choice]:
    """The framework for each op of a step that nothing else runs."""
    names = {node.name for node in step.nodes}
    return [
        Choice((single.name,), fallback(single, space))
        for single in one_by_one(graph)
        if single.name in names
    ]
