"""Plans of covers, and what runs the ops that a cover leaves to the framework."""

from __future__ import annotations

from dataclasses import replace

from plantune.errors import IllegalCandidate
from plantune.graph import Graph, Step
from plantune.graph.partition import partition_into
from plantune.kernels.family import Candidate
from plantune.kernels.registry import candidates
from plantune.plans.guess import FALLBACK, framework_plan
from plantune.plans.plan import Choice, Plan
from plantune.plans.planner.candidates import FRAMEWORK, VIEW
from plantune.plans.planner.cover import Cover
from plantune.plans.written_words import MEASURED
from plantune.space.search_space import SearchSpace


def plan_of(cover: Cover, graph: Graph, space: SearchSpace, *, network: str) -> Plan:
    """The plan of a cover; constants are left to the framework."""
    chosen = [Choice(item.nodes, item.candidate) for item in cover]
    covered = {name for choice in chosen for name in choice.nodes}
    rest = partition_into(
        graph,
        [
            *(choice.nodes for choice in chosen),
            *([node.name] for node in graph.nodes if node.name not in covered),
        ],
    )
    chosen += [
        Choice((step.name,), fallback(step, space)) for step in rest if step.name not in covered
    ]
    plain = framework_plan(graph, space, network=network)
    return replace(plain, choices=tuple(chosen), origin=MEASURED)


def fallback(step: Step, space: SearchSpace) -> Candidate:
    """The framework's candidate for a single op."""
    legal = candidates(step, space, (VIEW, FRAMEWORK))
    admitted = (c for preference in FALLBACK for c in legal if preference.admits(step, c))
    found = next(admitted, None)
    if found is None:
        raise IllegalCandidate(f"the framework does not run step {step.name!r}")
    return found
