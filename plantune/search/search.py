"""A search: measures steps, ranks whole plans, races the winner, and keeps everything it finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from plantune.devices.machine import Environment
from plantune.errors import OutOfTime
from plantune.measure.worker.client import Worker
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.plan import Plan
from plantune.search.budget import Budget
from plantune.search.contenders import choice, finish
from plantune.search.endings import NOTHING_LEFT, REFUTED, Endings, why_needless
from plantune.search.machine_log import MachineLog
from plantune.search.results import Report, Result, SearchOptions, silent
from plantune.search.run import Run
from plantune.search.shared.board import Board
from plantune.search.sharing import found_elsewhere, prove_on_all, publish
from plantune.search.sought import Sought
from plantune.search.start import measured


@dataclass
class Search:
    """One search, whose budget begins when it is made. `run` may be interrupted; `partial` returns
    what was found until then. With a `board` it shares its work with other searches.
    """

    sought: Sought
    options: SearchOptions
    database: PlanDatabase
    environment: Environment
    report: Report = silent
    board: Board | None = None
    # What there is of it so far: the best plan that was timed, the one that got through its race,
    # and what is kept of that.
    started: Run | None = field(default=None, init=False)
    best: Plan | None = field(default=None, init=False)
    _raced: choice.Winner | None = field(default=None, init=False)
    _kept: Result | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        options = self.options
        self.log = MachineLog.of(self.sought.space.arch, options.slots)
        self.budget = Budget(options.budget_s, spent_s=options.spent_s)
        self._endings = Endings(self.sought, self.database, self.environment)

    def run(self, worker: Worker, *others: Worker) -> Result:
        """Measures steps, ranks whole plans, races the winner and keeps it; the framework's plan if
        no other one is left. The first worker ranks and races, the others measure beside it and
        prove the plan too.
        """
        if (why := why_needless(self.sought.graph, self.sought.problem)) is not None:
            return self._nothing_left(why)
        try:
            run, known = measured(self, (worker, *others))
            if (theirs := found_elsewhere(self.board, run, self.environment)) is not None:
                return self._taken(run, theirs)
            run, ranking = choice.ranked(run, known)
            self.log.snapshot("ranking")
            self.best = ranking.plans[0]
            self._raced = choice.raced(run, ranking, self._endings.failed)
        except OutOfTime:
            return self._without_race()
        except NOTHING_LEFT as error:
            return self._nothing_left(str(error))
        self._endings.warn_of_failed()
        return self._shared(run, self._judged(run, self._raced))

    def partial(self) -> Result | None:
        """What is best so far: the plan that got through its race, else one that is kept as
        partial; None before anything was measured.
        """
        run = self.started
        if self._kept is not None:
            return replace(self._kept, complete=False)
        if run is None:
            return None
        if self._raced is not None:
            kept = self._keep(finish.finished(run, self._raced, self.log))
            return replace(kept, complete=False)
        best = self.best or choice.best_so_far(run)
        if best is None:
            return None
        self.database.put_plan(best, self.environment, partial=True)
        return self._result(best, complete=False)

    def _judged(self, run: Run, winner: choice.Winner) -> Result:
        """Keeps the plan, once it is clear who runs it."""
        self._kept = self._keep(*finish.decided(run, winner, self.log))
        return self._kept

    def _keep(self, winner: choice.Winner, notes: Sequence[str] = ()) -> Result:
        self.database.put_plan(winner.plan, self.environment)
        return self._result(winner.plan, race=winner.race, notes=notes)

    def _shared(self, run: Run, kept: Result) -> Result:
        """What is kept, unless another search gave its plan to all meanwhile."""
        while not self._publish(kept.plan):
            if (theirs := found_elsewhere(self.board, run, self.environment)) is not None:
                return self._taken(run, theirs)
        return kept

    def _publish(self, plan: Plan) -> bool:
        return publish(self.board, plan)

    def _taken(self, run: Run, plan: Plan) -> Result:
        """Keeps a plan that another search found, once every worker here has proved it."""
        try:
            prove_on_all(run, plan)
        except REFUTED as error:
            return self._nothing_left(f"the plan that another search found failed here: {error}")
        self.database.put_plan(plan, self.environment)
        return self._result(plan, elsewhere=True)

    def _without_race(self) -> Result:
        """The plan that calls use already stays; if there is none, the network runs as it is, which
        needs no race.
        """
        self.log.snapshot("its end")
        self._endings.warn_of_failed()
        plan, known = self._endings.without_race()
        self._publish(plan)
        return self._result(plan, known=known)

    def _nothing_left(self, why: str) -> Result:
        """The framework runs the network; other searches of a study may find more."""
        self.log.snapshot("its end")
        return self._result(self._endings.nothing_left(), nothing_left=why)

    def _result(self, plan: Plan, *, notes: Sequence[str] = (), **found: Any) -> Result:
        counts = {} if self.started is None else self.started.steps.counts()
        return Result(
            plan,
            **{"complete": True, "race": None, **counts, **found},
            budget_s=self.options.budget_s,
            spent_s=self.budget.spent_s,
            stages_s=self.budget.stages_s,
            notes=(*self.log.warnings(), *notes),
        )
