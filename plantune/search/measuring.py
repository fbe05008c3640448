"""How a search has a candidate measured, and where it keeps what came of it."""

from __future__ import annotations

import math
from dataclasses import replace

from plantune.graph.step import Step
from plantune.kernels.family import Candidate
from plantune.kernels.registry import candidates
from plantune.machine import Environment
from plantune.measure.client import Worker
from plantune.measure.machine_state import Machine
from plantune.measure.outcome import Measured, Outcome
from plantune.measure.timing import Effort
from plantune.plan_db.database import PlanDatabase
from plantune.search.budget import Budget
from plantune.search.proposals import Ledger
from plantune.search.pulse import Pulse
from plantune.space.search_space import SearchSpace

# The GPU's own clock knows a kernel's time after some milliseconds; the CPU's is shared.
# What is close is compared again, in whole programs.
EFFORTS = {
    "cpu": Effort(budget_s=0.1, warm_up_s=0.02, tolerance=0.01),
    "cuda": Effort(budget_s=0.06, warm_up_s=0.005),
}


class Measurer:
    """Candidates go through Optuna's ledger into the worker."""

    def __init__(
        self,
        worker: Worker,
        ledger: Ledger,
        space: SearchSpace,
        seed: int,
        budget: Budget,
        machine: Machine,
    ) -> None:
        self._worker = worker
        self._pulse = Pulse(machine, budget)
        self._budget = budget
        self._ledger = ledger
        self._space = space
        self._seeds = (2 * seed, 2 * seed + 1)
        self._choices: dict[str, tuple[Candidate, ...]] = {}

    def measure(self, step: Step, candidate: Candidate, limit_us: float) -> Outcome:
        if step.signature not in self._choices:
            self._choices[step.signature] = candidates(step, self._space)
        arch = self._space.arch
        effort = self._budget.limited(EFFORTS[arch.kind], "measuring")
        if math.isfinite(limit_us):
            effort = replace(effort, give_up_above_us=limit_us)
        with self._pulse.taken() as taken:
            outcome = self._worker.check_and_time(
                step, candidate, arch.name, effort, seeds=self._seeds
            )
        outcome = taken.corrected(outcome)
        self._ledger.keep(step, candidate, self._choices[step.signature], outcome)
        return outcome


class Store:
    """Trials in the plan database, for one environment. What was noisy is not known."""

    def __init__(self, database: PlanDatabase, environment: Environment, fresh: bool) -> None:
        self._database = database
        self._environment = environment
        self._fresh = fresh

    def known(self, step: Step) -> dict[Candidate, Outcome]:
        if self._fresh:
            return {}
        rows = self._database.trials(step.signature, self._environment)
        return {
            candidate: outcome
            for candidate, outcome in rows.items()
            if isinstance(outcome, Measured) or outcome.stage != "noisy"
        }

    def keep(self, step: Step, candidate: Candidate, outcome: Outcome) -> None:
        self._database.put_trial(step.signature, candidate, self._environment, outcome)
