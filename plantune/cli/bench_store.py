"""`plantune bench --store`: keeps a race as the evidence of the plan that ran in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from plantune.base.canonical import Attrs
from plantune.cli.lookup import Chosen, database, environment_here
from plantune.plans.raced_routes import COMPILED, RacedRoutes
from plantune.plans.written_words import MEASURED

if TYPE_CHECKING:
    from plantune.measure.racing.race import Race
    from plantune.plans.plan import Plan
    from plantune.search.machine_log import MachineLog

# Earlier evidence that a race does not replace; the second is kept only if it is from this machine.
OF_KERNELS, OF_SEARCH = "deterministic", "search_s"


def require_routes(chosen: Chosen, routes: Iterable[str]) -> None:
    """Raises UsageError if the race would say less than what is stored, or could not tell who runs
    the network.
    """
    if missing := _missing(chosen, routes):
        raise click.UsageError(f"--store needs these routes in the race too: {', '.join(missing)}")


def store_race(
    place: Path | None, chosen: Chosen, race: Race, log: MachineLog
) -> tuple[int | None, str]:
    """Stores the plan again, judged by this race; its new id, and a line that says so. None with
    the reason if a route that is needed did not run, or if the race decided nothing: noise would
    choose who runs the network.
    """
    from plantune.plans.database.plan_database import lies_in_file
    from plantune.plans.database.proofs import remember_proof

    if missing := _missing(chosen, race.timings):
        return None, f"not stored: {', '.join(missing)} did not run"
    if race.ratio is not None and race.ratio.is_undecided:
        return None, "not stored: this race did not decide who is faster"
    plan, here = _judged(chosen, race, log), environment_here(chosen.workload.arch)
    with database(place, read_only=False) as opened:
        id = opened.put_plan(plan, here)
        path = opened.path
    if not lies_in_file(path, plan):
        return None, f"not stored: {path} cannot be written"
    if not _ran(plan, chosen):
        return id, f"plan {id} in {path} is of the framework's kernels, which won this race"
    remember_proof(plan, here)  # its outputs were compared with the framework's
    return id, f"plan {id} in {path} has this race as its evidence"


def _ran(plan: Plan, chosen: Chosen) -> bool:
    """Whether the plan that a race is judged to is the one that ran in it."""
    kernels = [[(c.nodes, c.candidate) for c in one.choices] for one in (plan, chosen.plan)]
    return kernels[0] == kernels[1]


def _missing(chosen: Chosen, raced: Iterable[str]) -> list[str]:
    """The routes without a compiler, of which one runs the network if the plan loses, and all that
    the plan was raced against before, without those in this race.
    """
    from plantune.measure.racing.routes import framework_routes

    problem = chosen.workload.problem
    routes = framework_routes(problem.arch, problem.mode)
    raced_before = RacedRoutes.of(chosen.plan.evidence).names
    needed = (name for name in routes if name in raced_before or not name.startswith(COMPILED))
    return [name for name in needed if name not in set(raced)]


def _judged(chosen: Chosen, race: Race, log: MachineLog) -> Plan:
    """The plan as a search would store it after this race."""
    from plantune.search.contenders.judgement import judged_alone, plain_graph
    from plantune.space.search_space import load_search_space

    plan, workload = replace(chosen.plan, origin=MEASURED), chosen.workload
    kept = [OF_KERNELS]
    if chosen.match == "exact":
        kept.append(OF_SEARCH)
    else:  # the times of its steps are another machine's
        plan = replace(plan, choices=tuple(replace(c, times=None) for c in plan.choices))
    space = load_search_space(workload.arch)
    captured = plain_graph(workload.graph, space, network=workload.network)
    judged = judged_alone(plan, race, captured)
    if not _ran(judged, chosen):  # what is known of its kernels is not of the framework's
        kept = []
    evidence = {name: chosen.plan.evidence[name] for name in kept if name in chosen.plan.evidence}
    return replace(judged, evidence=Attrs({**judged.evidence, **evidence, **log.evidence()}))
