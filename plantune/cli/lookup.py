"""Finds what commands work on: the database, and the plan for a workload or an id."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from plantune.cli.exit_codes import NoUsableDevice
from plantune.errors import (
    DamagedDatabase,
    ForeignPlan,
    InvalidPlan,
    NoPlan,
    PlantuneError,
    UnsupportedDevice,
)
from plantune.workload import Workload

if TYPE_CHECKING:
    from plantune.machine import Environment
    from plantune.measure.client import Worker
    from plantune.plan import Plan
    from plantune.plan_db.database import PlanDatabase
    from plantune.plan_db.rows import StoredPlan


@dataclass(frozen=True)
class Chosen:
    """A stored plan with what it solves; `id` is None of one that plantune ships."""

    plan: Plan
    environment: Environment
    match: str
    id: int | None
    workload: Workload

    @property
    def label(self) -> str:
        return f"plan {self.id}" if self.id is not None else "the shipped plan"


def database(place: Path | None, *, read_only: bool = True) -> PlanDatabase:
    """The plan database. One that is damaged is set aside, which needs a writer."""
    from plantune.plan_db.database import PlanDatabase

    try:
        return PlanDatabase.open(place, read_only=read_only)
    except DamagedDatabase:
        return PlanDatabase.open(place)


def lies_in_file(path: Path | None, plan: Plan) -> bool:
    """Whether a plan that was stored is in the file, as another process would see it: where a file
    cannot be used the database was in memory.
    """
    from plantune.plan_db.database import PlanDatabase

    if path is None or is_passing(path.parent):
        return False
    try:
        with PlanDatabase.open(path, read_only=True) as opened:
            return any(stored.plan == plan for stored in opened.plans())
    except PlantuneError:
        return False


def is_passing(folder: Path) -> bool:
    """Whether it is what `cache_folder` makes for one process, where no other can be written."""
    return folder.name.startswith("plantune-") and folder.parent == Path(tempfile.gettempdir())


def require_match(chosen: Chosen) -> None:
    """Raises ForeignPlan if a plan is for another chip than this machine's."""
    if chosen.match == "foreign":
        here = environment_here(chosen.plan.problem.arch)
        expected = f"{here.arch} ({here.device})"
        got = f"{chosen.environment.arch} ({chosen.environment.device})"
        text = f"{chosen.label} is for another chip: expected {expected}, got {got}"
        raise ForeignPlan(text, expected, got)


def chosen_plan(place: Path | None, workload: Workload, id: int | None = None) -> Chosen:
    """The stored plan with this id, else the best one for the workload. One that was made for
    another chip of its arch is found too: see `require_match`.

    Raises NoPlan if there is none, and ForeignPlan if all are for other archs.
    """
    with database(place) as opened:
        return _by_id(opened, workload, id) if id is not None else _by_key(opened, workload)


def stored_plan(opened: PlanDatabase, id: int) -> StoredPlan:
    """Raises NoPlan if no plan has this id."""
    for stored in opened.plans():
        if stored.id == id:
            return stored
    raise NoPlan(f"{opened.path}: no plan has the id {id}; see plantune plans list --all")


def _by_id(opened: PlanDatabase, workload: Workload, id: int) -> Chosen:
    from plantune.plan import named_as

    stored = stored_plan(opened, id)
    match = environment_here(stored.plan.problem.arch).match(stored.environment)
    wanted = _workload_for(stored.plan, workload.in_channels)
    plan = named_as(stored.plan, wanted.graph)
    return Chosen(plan, stored.environment, match, stored.id, wanted)


def _by_key(opened: PlanDatabase, workload: Workload) -> Chosen:
    from plantune.plan import named_as
    from plantune.plan_db.rows import best
    from plantune.plan_db.stored import find_stored_plan

    problem, here = workload.problem, environment_here(workload.arch)
    stored = opened.find_plan(problem, here)
    found = best((stored, find_stored_plan(problem, here, database=opened.path)))
    own = found is stored
    if found is None:
        raise NoPlan(
            f"no plan for {workload} is stored; run plantune search {workload.arguments()}"
        )
    if (arch := found.plan.problem.arch) != workload.arch:
        got = f"{arch} ({found.environment.device})"
        expected = f"for another chip: expected {workload.arch}, got {got}"
        text = f"the only plan for these layers is {expected}"
        raise ForeignPlan(f"{text}; run plantune search {workload.arguments()}", workload.arch, got)
    plan = named_as(found.plan, workload.graph)
    return Chosen(plan, found.environment, found.match, found.id if own else None, workload)


def _workload_for(plan: Plan, in_channels: int) -> Workload:
    """What a plan was searched for. Plans from before calls were kept don't know their channels.

    Raises InvalidPlan if that does not give the plan's graph.
    """
    from plantune.plan import is_for

    kept = plan.problem
    workload = (
        Workload(kept.network, kept.batch, in_channels, kept.mode, kept.dtype, kept.arch)
        if kept.call is None
        else Workload.of(kept)
    )
    if not is_for(plan, workload.graph):
        raise InvalidPlan(
            f"the plan's layers are not those of {kept.network} in this plantune; search again"
            + ("" if kept.call else ", or give --in-channels if images do not have 3 channels")
        )
    return workload


def environment_here(arch: str) -> Environment:
    """This machine's environment for an arch; for one that is not here that of its best."""
    from plantune.gpus import best_arch, device_for
    from plantune.machine import environment_of
    from plantune.space.arch import load_arch

    try:
        device = device_for(load_arch(arch))
    except UnsupportedDevice:
        device = device_for(load_arch(best_arch()))
    return environment_of(device.place)


def require_device(arch: str, what: str) -> None:
    """Raises NoUsableDevice if no processor of `arch` is here."""
    from plantune.gpus import best_arch, device_for
    from plantune.space.arch import load_arch

    try:
        device_for(load_arch(arch))
    except UnsupportedDevice as error:
        raise NoUsableDevice(
            f"cannot {what} for {arch}: {error}; use --arch {best_arch()} "
            "(plantune doctor shows what this machine has)"
        ) from error


def worker_for(workload: Workload, build_s: float | None = None) -> Worker:
    """A measuring worker, with so many seconds for each build. A GPU leaves cores for another
    worker that waits in reserve.

    Raises NotEnoughMemory if there is no room for the network.
    """
    from plantune.measure.client import Limits, Worker
    from plantune.measure.room import require_room

    usual = Limits()
    memory_bytes = max(usual.memory_bytes, 2 * require_room(workload.graph, workload.problem))
    limits = replace(usual, memory_bytes=memory_bytes, build_s=build_s or usual.build_s)
    reserve = None if workload.arch == "cpu" else workload.arch
    return Worker(limits=limits, reserve=reserve, at_once=False)
