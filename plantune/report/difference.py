"""What changed between two plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from plantune.problem import PROBLEM_FIELDS
from plantune.report.tables import config_text, table

if TYPE_CHECKING:
    from plantune.plan import Choice, Plan
    from plantune.plan_db.rows import StoredPlan

HEADER = (*PROBLEM_FIELDS, "origin", "runner", "branches")
Pair = tuple[Any, Any]


@dataclass(frozen=True)
class Difference:
    """Fields as (first, second). Steps are told apart by the nodes that they cover."""

    header: dict[str, Pair]
    environment: dict[str, Pair]
    evidence: dict[str, Pair]
    other_candidates: list[tuple[tuple[str, ...], str, str]] = field(default_factory=list)
    only_first: list[tuple[tuple[str, ...], str]] = field(default_factory=list)
    only_second: list[tuple[tuple[str, ...], str]] = field(default_factory=list)
    same: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "header": {name: list(pair) for name, pair in self.header.items()},
            "environment": {name: list(pair) for name, pair in self.environment.items()},
            "evidence": {name: list(pair) for name, pair in self.evidence.items()},
            "other_candidates": [
                {"nodes": list(nodes), "first": first, "second": second}
                for nodes, first, second in self.other_candidates
            ],
            "only_first": [{"nodes": list(n), "candidate": c} for n, c in self.only_first],
            "only_second": [{"nodes": list(n), "candidate": c} for n, c in self.only_second],
            "same_steps": self.same,
        }


def difference(first: StoredPlan, second: StoredPlan) -> Difference:
    one, other = _by_nodes(first.plan), _by_nodes(second.plan)
    both = [nodes for nodes in one if nodes in other]
    changed = [nodes for nodes in both if one[nodes].candidate != other[nodes].candidate]
    return Difference(
        header=_changed(first.plan.to_json(), second.plan.to_json(), HEADER),
        environment=first.environment.differences(second.environment),
        evidence=_changed(first.plan.evidence, second.plan.evidence),
        other_candidates=[(n, _candidate(one[n]), _candidate(other[n])) for n in changed],
        only_first=[(n, _candidate(one[n])) for n in one if n not in other],
        only_second=[(n, _candidate(other[n])) for n in other if n not in one],
        same=len(both) - len(changed),
    )


def _changed(
    one: Mapping[str, Any], other: Mapping[str, Any], names: Iterable[str] | None = None
) -> dict[str, Pair]:
    """What differs, of these names or of all that either has."""
    names = dict.fromkeys((*one, *other)) if names is None else names
    pairs = {name: (one.get(name), other.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _by_nodes(plan: Plan) -> dict[tuple[str, ...], Choice]:
    return {choice.nodes: choice for choice in plan.choices}


def _candidate(choice: Choice) -> str:
    return config_text(choice.candidate.family, choice.candidate.config)


def difference_text(found: Difference, width: int | None = None) -> str:
    """Just "no difference" if there is none."""
    parts = []
    for title, pairs in (
        ("plan", found.header),
        ("environment", found.environment),
        ("evidence", found.evidence),
    ):
        rows = [[name, _short(one), _short(other)] for name, (one, other) in pairs.items()]
        if rows:
            parts.append(table([title, "first", "second"], rows, "lll", width))
    rows = [[nodes_text(nodes), a, b] for nodes, a, b in found.other_candidates]
    if rows:
        parts.append(table(["steps with another candidate", "first", "second"], rows, "lll", width))
    for which, steps in (("first", found.only_first), ("second", found.only_second)):
        rows = [[nodes_text(nodes), candidate] for nodes, candidate in steps]
        if rows:
            parts.append(table([f"steps only in the {which}", "candidate"], rows, "ll", width))
    return "\n\n".join([*parts, f"{found.same} steps are the same"] if parts else ["no difference"])


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 32 else f"{text[:29]}..."


def nodes_text(nodes: tuple[str, ...]) -> str:
    """The first node, and how many follow it."""
    return nodes[0] if len(nodes) == 1 else f"{nodes[0]} +{len(nodes) - 1}"
