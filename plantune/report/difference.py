"""What changed between two plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from plantune.plans.written_words import ROUTE
from plantune.report.tables import and_more, config_text, table

if TYPE_CHECKING:
    from plantune.plans.database.rows import StoredPlan
    from plantune.plans.plan import Plan

Steps = Mapping[tuple[str, ...], str]  # what runs each, by the nodes that it covers


def difference(first: StoredPlan, second: StoredPlan) -> dict[str, Any]:
    """As JSON: fields as [first, second]; steps are told apart by the nodes that they cover."""
    one, other = _by_nodes(first.plan), _by_nodes(second.plan)
    both = [nodes for nodes in one if nodes in other]
    changed = [nodes for nodes in both if one[nodes] != other[nodes]]
    there = first.environment.differences(second.environment)
    return {
        "header": _changed(_header(first.plan), _header(second.plan)),
        "environment": {name: list(pair) for name, pair in there.items()},
        "evidence": _changed(first.plan.evidence, second.plan.evidence),
        "other_candidates": [
            {"nodes": list(nodes), "first": one[nodes], "second": other[nodes]} for nodes in changed
        ],
        "only_first": _only(one, other),
        "only_second": _only(other, one),
        "same_steps": len(both) - len(changed),
    }


def _header(plan: Plan) -> dict[str, Any]:
    of_plan = {ROUTE: plan.route, "branches": plan.branches}
    return {**plan.problem.key.to_json(), "origin": plan.written_origin, **of_plan}


def _changed(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that differ, including those that only one side has."""
    pairs = {name: [one.get(name), other.get(name)] for name in (*one, *other)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _by_nodes(plan: Plan) -> Steps:
    return {choice.nodes: config_text(choice.candidate) for choice in plan.choices}


def _only(one: Steps, other: Steps) -> list[dict[str, Any]]:
    return [
        {"nodes": list(nodes), "candidate": candidate}
        for nodes, candidate in one.items()
        if nodes not in other
    ]


def difference_text(found: Mapping[str, Any], width: int | None = None) -> str:
    """Just "no difference" if there is none."""
    parts = []
    for title, name in (("plan", "header"), ("environment",) * 2, ("evidence",) * 2):
        rows = [[key, _short(one), _short(other)] for key, (one, other) in found[name].items()]
        if rows:
            parts.append(table([title, "first", "second"], rows, "lll", width))
    for title, name, values in (
        ("steps with another candidate", "other_candidates", ["first", "second"]),
        ("steps only in the first", "only_first", ["candidate"]),
        ("steps only in the second", "only_second", ["candidate"]),
    ):
        rows = [[and_more(step["nodes"]), *map(step.get, values)] for step in found[name]]
        if rows:
            parts.append(table([title, *values], rows, "lll"[: 1 + len(values)], width))
    same = f"{found['same_steps']} steps are the same"
    return "\n\n".join([*parts, same] if parts else ["no difference"])


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 32 else f"{text[:29]}..."
