"""A search's database that goes on in memory if the file fails, and remembers that."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from plantune.base.outcome import Outcome
from plantune.devices.machine import Environment
from plantune.errors import DatabaseUnavailable
from plantune.kernels.family import Candidate
from plantune.plans.database.leases import Lease
from plantune.plans.database.plan_database import PlanDatabase, lies_in_file
from plantune.plans.database.rows import Found, StoredPlan
from plantune.plans.plan import Plan
from plantune.plans.problem import Problem

T = TypeVar("T")


class KeepingDatabase(PlanDatabase):
    """The part of a plan database that a search uses. It never closes the file: that is up to
    the caller that opened it.

    `plan_id` is the id of the last plan in the file, None if it is not there.
    """

    def __init__(self, file: PlanDatabase, warn: Callable[[str], None]) -> None:
        self.path = file.path
        self.read_only = False
        self.plan_id: int | None = None
        self.fault: DatabaseUnavailable | None = None
        self._file = file
        self._memory: PlanDatabase | None = None
        self._warn = warn

    def put_trial(
        self, signature: str, candidate: Candidate, environment: Environment, outcome: Outcome
    ) -> None:
        self._try(lambda at: at.put_trial(signature, candidate, environment, outcome))

    def trials(self, signature: str, environment: Environment) -> dict[Candidate, Outcome]:
        return self._try(lambda at: at.trials(signature, environment))

    def plans(self) -> tuple[StoredPlan, ...]:
        return self._try(lambda at: at.plans())

    def find_plan(self, problem: Problem, environment: Environment) -> Found | None:
        return self._try(lambda at: at.find_plan(problem, environment))

    def put_plan(self, plan: Plan, environment: Environment, *, partial: bool = False) -> int:
        """Into the file even after it failed: there may be room again."""
        self.plan_id = None
        with suppress(DatabaseUnavailable):
            id = self._file.put_plan(plan, environment, partial=partial)
            self.plan_id = id if lies_in_file(self.path, plan) else None
            return id
        return self._try(lambda at: at.put_plan(plan, environment, partial=partial))

    def acquire_lease(self, key: str) -> Lease:
        return self._file.acquire_lease(key)

    def wait_for_lease(self, key: str, timeout_s: float, **how: float) -> Lease:
        return self._file.wait_for_lease(key, timeout_s, **how)

    def _try(self, use: Callable[[PlanDatabase], T]) -> T:
        if self._memory is not None:
            return use(self._memory)
        try:
            return use(self._file)
        except DatabaseUnavailable as error:
            self.fault = error
            if not self._file.read_only:  # else whoever opened it was warned
                self._warn(f"{error}. The search goes on in memory.")
            self._memory = PlanDatabase.in_memory()
            return use(self._memory)
