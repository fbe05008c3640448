"""The plan database: what searches measured and found."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from plantune.base.canonical import canonical
from plantune.base.outcome import Measured, Outcome, Rejected
from plantune.base.paths import database_path, is_passing
from plantune.devices.machine import Environment
from plantune.errors import InvalidPlan, NoPlan, PlantuneError, ReadOnlyDatabase
from plantune.kernels.family import Candidate
from plantune.plans.database import rows
from plantune.plans.database.finding import find_plan
from plantune.plans.database.leases import Lease, wait_for_lease
from plantune.plans.database.opening import Opened, in_memory, now_text, open_database
from plantune.plans.database.transactions import immediate, translated
from plantune.plans.plan import Plan
from plantune.plans.problem import Problem

_MEASURED = ("median_us", "low_us", "high_us", "samples", "error", "bound", "deterministic")
# The row of `meta` with the highest id that a plan ever had here: those of removed plans are not
# given again.
_HIGHEST = "highest_plan_id"
_IDS_MAX = 1 << 62
_PLAIN = {rows.INTEGER: int, rows.REAL: float}


def trial_row(
    step: str, candidate: Candidate, environment: str, outcome: Outcome, created_at: str
) -> rows.Row:
    """`step` is the step's signature, `environment` the key of one."""
    values: dict[str, Any] = dict.fromkeys(rows.TRIALS)
    values.update(step=step, candidate=canonical(candidate.to_json()), environment=environment)
    values.update(asdict(outcome), created_at=created_at)
    values["kind"] = "measured" if isinstance(outcome, Measured) else "rejected"
    return rows.sealed("trials", {name: _stored(name, value) for name, value in values.items()})


def _stored(name: str, value: Any) -> Any:
    """The value as SQLite will give it back: a column has one type."""
    plain = _PLAIN.get(rows.TRIALS[name])
    return value if value is None or plain is None else plain(value)


def parse_trial(row: rows.Row) -> tuple[Candidate, Outcome]:
    """The trial of a row whose checksum was checked; raises InvalidPlan or ValueError."""
    candidate = Candidate.from_json(json.loads(row["candidate"]))
    if row["kind"] == "rejected":
        return candidate, Rejected(row["stage"], row["reason"])
    if row["kind"] != "measured":
        raise InvalidPlan(f"kind: must be measured or rejected, got {row['kind']!r}")
    values = {name: row[name] for name in _MEASURED}
    values["deterministic"] = bool(values["deterministic"])
    return candidate, Measured(**values, cache=row["cache"])


class PlanDatabase:
    """Trials, plans and leases. Every method is one transaction.

    Reading warns of DamagedRow and never uses one. Any method raises DatabaseUnavailable if the
    file fails it: a search then goes on with `in_memory`. An object serves one thread.
    """

    def __init__(self, opened: Opened, path: Path | None) -> None:
        self.path = path
        self.read_only = opened.read_only
        self._db = opened.db

    @staticmethod
    def open(
        path: Path | None = None, *, read_only: bool = False, timeout_s: float = 10.0
    ) -> PlanDatabase:
        """The database at `path`, else the user's; made if it is missing.

        A damaged file is moved aside; one that stays locked for `timeout_s` or cannot be written is
        opened for reading, and where that is impossible too, one in memory is used: each with a
        warning. Raises NewerSchema, and InvalidDatabase for another program's.
        """
        place = path or database_path()
        return PlanDatabase(open_database(place, read_only=read_only, timeout_s=timeout_s), place)

    @staticmethod
    def in_memory() -> PlanDatabase:
        """An empty database that ends with this object."""
        return PlanDatabase(in_memory(), None)

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> PlanDatabase:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def put_trial(
        self, signature: str, candidate: Candidate, environment: Environment, outcome: Outcome
    ) -> None:
        """Keeps what became of a step's candidate; an earlier outcome of it is replaced."""
        row = trial_row(signature, candidate, environment.key, outcome, now_text())
        with self._writing() as db:
            self._put_environment(environment)
            db.table("trials").insert(row, replace=True)

    def trials(self, signature: str, environment: Environment) -> dict[Candidate, Outcome]:
        """The outcomes of a step's candidates in exactly this environment."""
        where = {"step": signature, "environment": environment.key}
        with translated(self.place):
            return dict(rows.read(self._db.conn, "trials", where, parse_trial))

    def put_plan(self, plan: Plan, environment: Environment, *, partial: bool = False) -> int:
        """Keeps a plan and returns its id. Earlier ones for its problem stay, but are not found."""
        status = rows.PARTIAL if partial else rows.COMPLETE
        with self._writing():
            return self._add(rows.StoredPlan(0, plan, environment, status, now_text()))

    def put_plans(self, plans: Sequence[rows.StoredPlan]) -> None:
        """Keeps all of them or, if one fails, none; their ids become new ones."""
        with self._writing():
            for stored in plans:
                self._add(stored)

    def find_plan(self, problem: Problem, environment: Environment) -> rows.Found | None:
        """The newest complete plan for a problem, an exact match before a compatible one, and last
        one for another chip, which must not be used.
        """
        with translated(self.place):
            return find_plan(self._db.conn, problem, environment)

    def plans(self) -> tuple[rows.StoredPlan, ...]:
        """Every plan, partial and earlier ones too, the newest first."""
        with translated(self.place):
            return tuple(rows.read_plans(self._db.conn, {}))

    def plan(self, id: int) -> rows.StoredPlan | None:
        """The plan with this id, None if there is none."""
        with translated(self.place):
            return next(iter(rows.read_plans(self._db.conn, {"id": id})), None)

    def holds(self, plan: Plan) -> bool:
        """Whether this very plan is stored."""
        same = {"graph": plan.problem.graph, "plan": plan.dumps()}
        with translated(self.place):
            return any(item.plan == plan for item in rows.read_plans(self._db.conn, same))

    def remove_plan(self, id: int) -> None:
        """Raises NoPlan if no plan has this id, which no other plan will get."""
        with self._writing() as db:
            self._keep_highest(self._highest_id())
            removed = db.execute("DELETE FROM plans WHERE id = ?", [id]).rowcount
        if not removed:
            raise NoPlan(f"{self.place}: no plan has the id {id}")

    def acquire_lease(self, key: str) -> Lease:
        """The right to search for `key`; raises Busy if a living process has it."""
        lease = Lease(key, self._writing)
        lease.acquire()
        return lease

    def wait_for_lease(self, key: str, timeout_s: float, *, poll_s: float = 0.5) -> Lease:
        """The right to search for `key` as soon as it is free; raises Busy after `timeout_s`."""
        lease = Lease(key, self._writing)
        wait_for_lease(lease, timeout_s, poll_s)
        return lease

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        return str(self.path or "the plan database in memory")

    @contextmanager
    def _writing(self) -> Iterator[Database]:
        if self.read_only:
            raise ReadOnlyDatabase(f"{self.place}: is open for reading only")
        with translated(self.place), immediate(self._db):
            yield self._db

    def _put_environment(self, environment: Environment) -> None:
        # Replaced, not ignored: the row that is there may be damaged.
        known = {"key": environment.key, "json": rows.environment_row(environment, "")["json"]}
        with_equal = rows.read(self._db.conn, "environments", known, lambda row: row)
        if not with_equal:
            row = rows.environment_row(environment, now_text())
            self._db.table("environments").insert(row, replace=True)

    def _add(self, stored: rows.StoredPlan) -> int:
        self._put_environment(stored.environment)
        id = self._highest_id() + 1
        self._db.table("plans").insert(rows.plan_row(replace(stored, id=id)))
        self._keep_highest(id)
        return id

    def _highest_id(self) -> int:
        """Of the plans here and of removed ones; a plantune that kept none may have added more."""
        query = "SELECT value FROM meta WHERE key = ? UNION ALL SELECT max(id) FROM plans"
        found = [str(value) for (value,) in self._db.execute(query, [_HIGHEST])]
        known = [int(text) for text in found if text.isdecimal() and len(text) < 20]
        return max((id for id in known if id < _IDS_MAX), default=0)

    def _keep_highest(self, id: int) -> None:
        self._db.table("meta").insert({"key": _HIGHEST, "value": str(id)}, replace=True)


def lies_in_file(path: Path | None, *plans: Plan) -> bool:
    """Whether plans that were stored are in the file, as another process would see it: where a file
    cannot be used the database was in memory.
    """
    if path is None or is_passing(path.parent):
        return False
    try:
        with PlanDatabase.open(path, read_only=True) as opened:
            return all(map(opened.holds, plans))
    except PlantuneError:
        return False
