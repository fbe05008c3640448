"""`plantune search --dry-run`: what would be tried, and how long at most."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from plantune.cli.console import Console
from plantune.cli.lookup import database, environment_here
from plantune.cli.options import Key
from plantune.graph.fusions import all_fusions
from plantune.machine import Environment
from plantune.plan_db.database import PlanDatabase
from plantune.report.tables import counted
from plantune.search.options import Try, tries
from plantune.space.search_space import load_search_space


def show_dry_run(console: Console, place: Path | None, key: Key, budget_s: float) -> None:
    """Looks at the graph, the search space and the stored trials; measures nothing."""
    graph = key.problem().graph
    all_tries = tries(graph, load_search_space(key.arch), all_fusions())
    distinct = {tried.key: tried for tried in all_tries}
    with database(place) as opened:
        known = _known(opened, list(distinct.values()), environment_here(key.arch))
    data = {
        "workload": key.to_json(),
        "ops": len(graph.nodes),
        "steps": len({tuple(node.name for node in tried.step.nodes) for tried in all_tries}),
        "distinct_steps": len({signature for signature, _ in distinct}),
        "candidates": len(distinct),
        "known": len(known & set(distinct)),
        "families": _by_family(list(distinct.values())),
        "budget_s": budget_s,
        "at_most_s": budget_s,
    }
    _say(console, key, data)
    console.emit(data)


def _known(opened: PlanDatabase, distinct: list[Try], here: Environment) -> set[Any]:
    """The tries that an earlier search here has measured or rejected."""
    signatures = {tried.step.signature for tried in distinct}
    return {
        (signature, candidate)
        for signature in signatures
        for candidate in opened.trials(signature, here)
    }


def _by_family(distinct: list[Try]) -> dict[str, int]:
    return dict(Counter(tried.candidate.family for tried in distinct).most_common())


def _say(console: Console, key: Key, data: dict[str, Any]) -> None:
    console.say(f"{key}: {data['ops']} ops, which {data['steps']} possible steps may cover")
    console.say(
        f"{data['distinct_steps']} of them differ, with "
        f"{counted(data['candidates'], 'candidate')}; "
        f"{data['known']} are known from earlier searches here"
    )
    rows = [[family, str(count)] for family, count in data["families"].items()]
    console.table(["family", "candidates"], rows, "lr")
    console.say(
        f"At most {data['at_most_s']:g} s: the budget ends the search, and only candidates that "
        "could be part of the fastest plan are measured. Nothing was measured now."
    )
