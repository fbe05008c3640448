"""Finds what commands work on: the database, and the plan for a workload or an id."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from plantune.base.paths import database_path
from plantune.cli.exit_codes import NoUsableDevice
from plantune.errors import DamagedDatabase, ForeignPlan, InvalidPlan, NoPlan, UnsupportedDevice
from plantune.plans.workload import Workload

if TYPE_CHECKING:
    from plantune.devices.machine import Environment
    from plantune.measure.worker.client import Worker
    from plantune.plans.database.plan_database import PlanDatabase
    from plantune.plans.database.rows import StoredPlan
    from plantune.plans.plan import Plan
    from plantune.plans.problem import Problem


@dataclass(frozen=True)
class Chosen:
    """A stored plan with what it solves; `id` is None of one that is not the user's own."""

    plan: Plan
    environment: Environment
    match: str
    id: int | None
    workload: Workload
    whose: str = "own"

    @property
    def label(self) -> str:
        return f"plan {self.id}" if self.id is not None else f"the {self.whose} plan"


def database(place: Path | None, *, read_only: bool = True) -> PlanDatabase:
    """The plan database. One that is damaged is set aside, which needs a writer."""
    from plantune.plans.database.plan_database import PlanDatabase

    try:
        return PlanDatabase.open(place, read_only=read_only)
    except DamagedDatabase:
        return PlanDatabase.open(place)


def to_run(command: str, workload: Workload, place: Path | None) -> str:
    """The command line of a command for a workload, with the database that was used."""
    db = "" if place in (None, database_path()) else f" --db {shlex.quote(str(place))}"
    return f"plantune {command} {workload.arguments()}{db}"


def plan_to_run(place: Path | None, workload: Workload, id: int | None, what: str) -> Chosen:
    """`chosen_plan`; raises ForeignPlan if it is for another chip than this machine's, and
    NoUsableDevice if no processor of the arch is here.
    """
    require_device(workload.arch, what)
    chosen = chosen_plan(place, workload, id)
    if chosen.match == "foreign":
        here = environment_here(chosen.plan.problem.arch)
        expected = f"{here.arch} ({here.device})"
        got = f"{chosen.environment.arch} ({chosen.environment.device})"
        text = f"{chosen.label} is for another chip: expected {expected}, got {got}"
        raise ForeignPlan(text, expected, got)
    return chosen


def chosen_plan(place: Path | None, workload: Workload, id: int | None = None) -> Chosen:
    """The stored plan with this id, else the best one for the workload. One that was made for
    another chip of its arch is found too: see `plan_to_run`.

    Raises NoPlan if there is none, and ForeignPlan if all are for other archs.
    """
    with database(place) as opened:
        return _by_id(opened, workload, id) if id is not None else _by_key(opened, workload)


def stored_plan(opened: PlanDatabase, id: int) -> StoredPlan:
    """Raises NoPlan if no plan has this id."""
    stored = opened.plan(id)
    if stored is not None:
        return stored
    raise NoPlan(f"{opened.path}: no plan has the id {id}; see plantune plans list --all")


def _by_id(opened: PlanDatabase, workload: Workload, id: int) -> Chosen:
    from plantune.plans.plan import named_as

    stored = stored_plan(opened, id)
    match = environment_here(stored.plan.problem.arch).match(stored.environment)
    wanted = _workload_for(stored.plan, workload)
    plan = named_as(stored.plan, wanted.graph)
    return Chosen(plan, stored.environment, match, stored.id, wanted)


def _by_key(opened: PlanDatabase, workload: Workload) -> Chosen:
    from plantune.plans.database.finding import best
    from plantune.plans.database.stored import find_stored_plan
    from plantune.plans.plan import named_as

    problem, here = workload.problem, environment_here(workload.arch)
    stored = opened.find_plan(problem, here)
    found = best((stored, find_stored_plan(problem, here, database=opened.path)))
    own = found is stored
    if found is None:
        search = to_run("search", workload, opened.path)
        raise NoPlan(f"no plan for {workload} is stored; run {search}")
    if (arch := found.plan.problem.arch) != workload.arch:
        got = f"{arch} ({found.environment.device})"
        expected = f"for another chip: expected {workload.arch}, got {got}"
        text = f"the only plan for these layers is {expected}"
        search = to_run("search", workload, opened.path)
        raise ForeignPlan(f"{text}; run {search}", workload.arch, got)
    plan = named_as(found.plan, workload.graph)
    id, whose = (found.id, "own") if own else (None, found.whose)
    return Chosen(plan, found.environment, found.match, id, workload, whose)


def _workload_for(plan: Plan, asked: Workload) -> Workload:
    """What a plan was searched for: the network that was asked for if that has no name, else the
    reference network. Plans from before calls were kept don't know their channels.

    Raises InvalidPlan if that does not give the plan's graph, or no module is given that could.
    """
    from plantune.models.registry import network_names
    from plantune.plans.plan import is_for

    kept = plan.problem
    if asked.factory is None and kept.network not in network_names():
        raise InvalidPlan(
            f"the plan is for {kept.network}, which is not one of plantune's own networks: name it "
            "with --model package.module:factory with --input or --image-size"
        )
    workload = asked if asked.factory is not None else _reference(kept, asked.in_channels)
    if not is_for(plan, workload.graph):
        raise InvalidPlan(
            f"the plan's layers are not those of {workload.network} in this plantune; search again"
            + ("" if kept.call else ", or give --in-channels if images do not have 3 channels")
        )
    return workload


def _reference(kept: Problem, in_channels: int) -> Workload:
    if kept.call is not None:
        return Workload.of(kept)
    return Workload(kept.network, kept.batch, in_channels, kept.mode, kept.dtype, kept.arch)


def environment_here(arch: str) -> Environment:
    """This machine's environment for an arch; for one that is not here that of its best."""
    from plantune.search.shared.slots import environment_on

    return environment_on((), arch)


def require_device(arch: str, what: str) -> None:
    """Raises NoUsableDevice if no processor of `arch` is here."""
    from plantune.devices.gpus import best_arch, device_for
    from plantune.space.arch import load_arch

    try:
        device_for(load_arch(arch))
    except UnsupportedDevice as error:
        raise NoUsableDevice(
            f"cannot {what} for {arch}: {error}; use --arch {best_arch()} "
            "(plantune doctor shows what this machine has)"
        ) from error


def worker_for(workload: Workload, build_s: float | None = None) -> Worker:
    """A measuring worker, with so many seconds for each build; see `session.worker_for`."""
    from plantune.search import session

    return session.worker_for(workload.graph, workload.problem, build_s)
