"""How a search has a candidate measured, and where it keeps the outcome."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Protocol

from plantune.base.outcome import Measured, Outcome, is_noisy
from plantune.devices.machine import Environment
from plantune.graph.step import Step
from plantune.kernels.family import Candidate
from plantune.measure.machine_state import Machine
from plantune.measure.timing import Effort
from plantune.measure.worker.client import Worker
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.precisions import trial_key
from plantune.search.budget import Budget
from plantune.search.machine_log import SlowSpells
from plantune.space.arch import load_arch
from plantune.space.search_space import SearchSpace

# The GPU's own clock knows a kernel's time after some milliseconds; a CPU is shared. Close
# candidates are compared again, in whole programs.
EFFORTS = {
    "cpu": Effort(budget_s=0.1, warm_up_s=0.02, tolerance=0.01),
    "cuda": Effort(budget_s=0.06, warm_up_s=0.005),
}

# How kernels find caches when they are timed; trials of earlier versions may say otherwise.
CACHES = {"cpu": "cold", "cuda": "warm"}


class TrialStore(Protocol):
    """Where outcomes are kept between searches."""

    def known(self, step: Step) -> dict[Candidate, Outcome]:
        """What was found for equal steps in this environment."""

    def keep(self, step: Step, candidate: Candidate, outcome: Outcome) -> None:
        """Keeps an outcome at once: a kill loses only the trial in flight."""


class WorkerMeasurer:
    """Has the worker check and time candidates, and corrects for slow spells of the machine."""

    def __init__(
        self, worker: Worker, space: SearchSpace, seed: int, budget: Budget, machine: Machine
    ) -> None:
        self._worker = worker
        self._slow_spells = SlowSpells(machine, budget)
        self._budget = budget
        self._arch = space.arch
        self._seeds = (2 * seed, 2 * seed + 1)

    def measure(self, step: Step, candidate: Candidate, limit_us: float) -> Outcome:
        effort = self._budget.limited(EFFORTS[self._arch.kind], "measuring")
        if math.isfinite(limit_us):
            effort = replace(effort, give_up_above_us=limit_us)
        with self._slow_spells.watched() as slowdown:
            outcome = self._worker.check_and_time(
                step, candidate, self._arch.name, effort, seeds=self._seeds
            )
        return slowdown.corrected(outcome)


class StoredTrials:
    """Trials in the plan database, for one environment. A noisy outcome is not known, nor one that
    was timed with caches in another state.
    """

    def __init__(self, database: PlanDatabase, environment: Environment, fresh: bool) -> None:
        self._database = database
        self._environment = environment
        self._fresh = fresh

    def known(self, step: Step) -> dict[Candidate, Outcome]:
        if self._fresh:
            return {}
        rows = self._database.trials(self._key(step), self._environment)
        return {candidate: outcome for candidate, outcome in rows.items() if self._counts(outcome)}

    def _counts(self, outcome: Outcome) -> bool:
        if isinstance(outcome, Measured):
            return outcome.cache == CACHES[load_arch(self._environment.arch).kind]
        return not is_noisy(outcome)

    def keep(self, step: Step, candidate: Candidate, outcome: Outcome) -> None:
        self._database.put_trial(self._key(step), candidate, self._environment, outcome)

    def _key(self, step: Step) -> str:
        return trial_key(step, self._environment.arch)
