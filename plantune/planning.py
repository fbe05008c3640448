"""Plans that no search made: the default one, and ones composed by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plantune.errors import IllegalCandidate
from plantune.graph.fusions import Fusion
from plantune.graph.graph import Graph
from plantune.graph.partition import fused
from plantune.graph.step import Step
from plantune.kernels.family import Candidate
from plantune.kernels.registry import candidates
from plantune.plan import Choice, Plan
from plantune.space.search_space import SearchSpace


@dataclass(frozen=True)
class Preference:
    """Candidates of `family` whose config has these values; `ops` limits it to such steps."""

    family: str
    config: Mapping[str, Any] = field(default_factory=dict)
    ops: tuple[str, ...] = ()

    def admits(self, step: Step, candidate: Candidate) -> bool:
        fits = all(candidate.config.get(key) == value for key, value in self.config.items())
        return candidate.family == self.family and fits and (not self.ops or self.ops == step.ops)


# A view costs nothing, so it is part of every plan; nchw is what callers bring.
FALLBACK = (Preference("view"), Preference("framework", {"layout": "nchw"}))


def compose(
    graph: Graph,
    space: SearchSpace,
    *,
    network: str,
    fusions: Sequence[Fusion] = (),
    preferences: Sequence[Preference] = (),
    origin: str = "hand",
) -> Plan:
    """The plan that fuses greedily and takes each step's first legal preferred candidate.

    A group that no preferred candidate can run stays unfused: the framework runs op by op.
    """
    steps = fused(graph, fusions, lambda step: _first(step, space, preferences) is not None)
    choices = []
    for step in steps:
        candidate = _first(step, space, (*preferences, *FALLBACK))
        if candidate is None:
            raise IllegalCandidate(f"no candidate runs step {step.name!r} on {space.arch.name}")
        choices.append(Choice(tuple(node.name for node in step.nodes), candidate))
    return _plan(graph, space, network, tuple(choices), origin)


def default_plan(graph: Graph, space: SearchSpace, *, network: str) -> Plan:
    """The framework's kernels, op by op, in the layout that callers bring."""
    return compose(graph, space, network=network, origin="default")


def _first(step: Step, space: SearchSpace, preferences: Sequence[Preference]) -> Candidate | None:
    legal = candidates(step, space)
    for preference in preferences:
        for candidate in legal:
            if preference.admits(step, candidate):
                return candidate
    return None


def _plan(
    graph: Graph, space: SearchSpace, network: str, choices: tuple[Choice, ...], origin: str
) -> Plan:
    type_ = graph.inputs[0][1]
    return Plan(
        network=network,
        graph=graph.digest,
        arch=space.arch.name,
        batch=type_.shape[0],
        dtype=type_.dtype,
        mode="infer" if graph.backward_from is None else "train",
        choices=choices,
        origin=origin,
    )
