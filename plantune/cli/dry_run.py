"""`plantune search --dry-run`: what would be tried, and how long at most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plantune.cli.console import Console
from plantune.cli.lookup import database, environment_here
from plantune.devices.machine import Environment
from plantune.graph.step import Step
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.planner.candidates import step_candidates
from plantune.plans.precisions import trial_key
from plantune.plans.workload import Workload
from plantune.report.tables import counted
from plantune.space.search_space import load_search_space


def show_dry_run(console: Console, place: Path | None, workload: Workload, budget_s: float) -> None:
    """Looks at the graph, the search space and the stored trials; measures nothing."""
    graph = workload.graph
    candidates = step_candidates(graph, load_search_space(workload.arch))
    distinct = {candidate.key: candidate for candidate in candidates}
    with database(place) as opened:
        steps = {candidate.key[0]: candidate.step for candidate in candidates}
        known = _known(opened, steps, environment_here(workload.arch))
    families = Counter(candidate.family for _, candidate in distinct)
    data = {
        "workload": workload.to_json(),
        "ops": len(graph.nodes),
        "steps": len({candidate.nodes for candidate in candidates}),
        "distinct_steps": len({signature for signature, _ in distinct}),
        "candidates": len(distinct),
        "known": len(known & set(distinct)),
        "families": dict(families.most_common()),
        "budget_s": budget_s,
        "at_most_s": budget_s,
    }
    _say(console, workload, data)
    console.emit(data)


def _known(opened: PlanDatabase, steps: Mapping[str, Step], here: Environment) -> set[Any]:
    """The candidates that an earlier search here measured or rejected, by the steps' signatures."""
    return {
        (signature, candidate)
        for signature, step in steps.items()
        for candidate in opened.trials(trial_key(step, here.arch), here)
    }


def _say(console: Console, workload: Workload, data: dict[str, Any]) -> None:
    console.say(f"{workload}: {data['ops']} ops, which {data['steps']} possible steps may cover")
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
