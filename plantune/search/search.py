"""The search: measures steps, ranks whole plans, races the winner, keeps everything on the way."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from plantune.canonical import Attrs
from plantune.default_plans import default_plan, hand_plan, problem_of
from plantune.errors import (
    MeasureTimeout,
    NoViableCandidate,
    OutOfTime,
    WorkerDied,
    WrongResult,
)
from plantune.machine import Environment
from plantune.measure.client import Worker
from plantune.measure.gpu_watch import gpu_watcher
from plantune.measure.machine_state import State, machine_for
from plantune.measure.outcome import Measured, Rejected
from plantune.measure.race import Race
from plantune.measure.timing import Effort, Timing
from plantune.measure.ways import baselines_for
from plantune.plan import Plan
from plantune.plan_db.database import PlanDatabase
from plantune.plan_db.rows import Found
from plantune.problem import Problem
from plantune.search.budget import Budget
from plantune.search.builds import builds_for
from plantune.search.contenders import affordable
from plantune.search.finalists import branched, improved, swaps
from plantune.search.gap import gap_lines
from plantune.search.judgement import Duels, duels_of, evidence_of, judged, repeated, undecided
from plantune.search.known import incumbent, known_plans
from plantune.search.measuring import Measurer, Store
from plantune.search.progress import Report, silent
from plantune.search.proposals import Ledger, TpeProposer
from plantune.search.pulse import marks, noted
from plantune.search.ranking import distinct, fastest, is_deterministic, kept, plan_of
from plantune.search.step_search import StepSearch
from plantune.search.unraced import known_plan, plain_plan
from plantune.space.search_space import load_search_space

COVERS_TO_RANK = 4
SWAPS_AT_ONCE = 7
REFINING_S = 1.0
# Ranking is left out where there is less time for it.
LEAST_RANKING_S = 0.3
# So many of the best, and the plainest, where others keep the machine busy.
FEW = 2
RACE_S = 8.0
MOST_RACES = 3
# A race that leaves something open is run again by those whom it leaves open, while there is time.
MOST_REPEATS = 4
LEAST_REPEAT_S = 1.0
# What timing the plans that are known already may take of the budget, and of seconds.
BEGINNING, BEGINNING_S = 0.1, 8.0
# The time that must be left for a way of torch.compile to join the race; others join always.
COMPILING_S = {"compile-default": 25.0, "compile-reduce-overhead": 25.0}
NEVER_S = float("inf")


@dataclass(frozen=True)
class Settings:
    """How to search: seconds in all, the seed of every draw, and what the winner races against:
    all ways of the arch for which there is time, where `baselines` names none. Without `shipped`
    a search begins from this machine's own plans alone.
    """

    budget_s: float = 90.0
    seed: int = 0
    fresh: bool = False
    storage: str | None = None
    baselines: tuple[str, ...] | None = None
    shipped: bool = True


@dataclass(frozen=True)
class Result:
    """The plan that was found. A partial one was not ranked and raced to the end.

    `candidates` are all that there are; with `exhausted`, none of the others could be part of a
    faster plan, else there was no time for them. Where there was none for a race either, `plan` is
    the `known` one that calls find already, or lets the network run as it is. `notes` say what
    disturbed the machine, and what that did to times.
    """

    plan: Plan
    complete: bool
    race: Race | None
    measured: int
    rejected: int
    candidates: int = 0
    exhausted: bool = True
    budget_s: float = 0.0
    known: Found | None = None
    spent_s: float = 0.0
    notes: tuple[str, ...] = ()


class Search:
    """One search. `run` may be interrupted; `partial` says what was found until then."""

    def __init__(
        self,
        problem: Problem,
        settings: Settings,
        database: PlanDatabase,
        environment: Environment,
        report: Report = silent,
    ) -> None:
        self.problem = problem
        self.settings = settings
        self.space = load_search_space(problem.arch)
        self._database = database
        self._environment = environment
        self._report = report
        self._steps: StepSearch | None = None
        self._best: Plan | None = None
        self._known: list[Plan] = []
        self._incumbent: Plan | None = None
        self._machine = machine_for(self.space.arch.kind, gpu_watcher(problem.arch))
        self._looks: dict[str, State] = {}
        self._budget = Budget(self.settings.budget_s)

    def run(self, worker: Worker) -> Result:
        """Searches to the end and keeps the plan; raises NoViableCandidate where nothing ran."""
        budget = self._budget = Budget(self.settings.budget_s)
        ledger = Ledger(self.settings.storage, self.settings.seed)
        measurer = Measurer(worker, ledger, self.space, self.settings.seed, budget, self._machine)
        store = Store(self._database, self._environment, self.settings.fresh)
        try:
            steps = self._searched(worker, measurer, store, budget)
            self._looks["measuring"] = self._machine.look()
            if not budget.left_s:
                raise OutOfTime("the time was over before anything was compared")
            plans = self._rank(worker, steps, budget)
            self._looks["ranking"] = self._machine.look()
            self._best = plans[0]
            self._tell(steps, budget, "racing")
            plan, race = self._raced(worker, plans, budget)
        except OutOfTime:
            return self._unraced()
        self._looks["race"] = self._machine.look()
        duels = self._repeated(worker, plan, race, budget)
        race = _with(duels, race)
        plan = judged(replace(plan, evidence=evidence_of(race)), duels, self._captured())
        same = is_deterministic(plan, self.problem.graph, self.space, steps.costs.outcomes)
        told = {"deterministic": int(same), "search_s": round(budget.spent_s, 1)}
        plan = replace(plan, evidence=Attrs({**plan.evidence, **told, **marks(self._looks)}))
        self._database.put_plan(plan, self._environment)
        gaps = gap_lines(race, steps.best_us, steps.framework_us(), self._looks["race"])
        result = self._result(plan, complete=True, race=race)
        return replace(result, notes=(*result.notes, *gaps))

    def _searched(
        self, worker: Worker, measurer: Measurer, store: Store, budget: Budget
    ) -> StepSearch:
        """The steps, measured as far as there was time."""
        with builds_for(self.space.arch, worker) as builds:
            steps = self._steps = StepSearch(
                self.problem.graph,
                self.space,
                measurer,
                store,
                builds=builds,
                proposer=TpeProposer(self.settings.seed),
            )
            budget.call_s = steps.framework_us() / 1e6
            worker.start(budget.cut_at("racing"))
            self._begin(worker, steps, budget)
            steps.run(budget, self._report)
        return steps

    def partial(self) -> Result | None:
        """What is best so far, kept as partial; None before anything was measured."""
        steps = self._steps
        if steps is None:
            return None
        measured = any(isinstance(o, Measured) for o in steps.costs.outcomes.values())
        if self._best is None and not measured:
            return None
        plan = self._best or plan_of(steps.covers(1)[0][1], self.problem, self.space)
        self._database.put_plan(plan, self._environment, partial=True)
        return self._result(plan, complete=False, race=None)

    def _begin(self, worker: Worker, steps: StepSearch, budget: Budget) -> None:
        """Times the plans that are known already, so that an early end has a good one, and measures
        the steps of the best of them first.
        """
        graph, database = self.problem.graph, self._database
        problem = problem_of(graph, self.space, network=self.problem.network)
        self._incumbent = incumbent(problem, self._environment, database)
        shipped = self.settings.shipped
        known = known_plans(
            graph, self.space, problem, self._environment, database, shipped=shipped
        )
        seconds = min(BEGINNING * budget.seconds, BEGINNING_S)
        known = affordable(known, graph, self.space, steps, 2 * seconds)
        if not known:
            return
        self._tell(steps, budget, "ranking")
        effort = budget.limited(Effort(budget_s=seconds), "measuring")
        timings: Sequence[Timing | Rejected] = ()
        with suppress(OutOfTime):  # so they wait for the ranking
            timings = self._timed(worker, known, effort)
        order = sorted((t.median_us, i) for i, t in enumerate(timings) if isinstance(t, Timing))
        self._known = [known[i] for _, i in order]
        if self._known:
            self._best = self._known[0]
            steps.begin_with(self._known[0], budget, self._report)

    def _rank(self, worker: Worker, steps: StepSearch, budget: Budget) -> list[Plan]:
        """The best covers, the plan picked by hand and the default one, timed as wholes: the winner
        with what is left to improve in it, then those that ran, the fastest first.

        Without time for that, as they are: first what is best by its steps.
        """
        plans = self._contenders(steps)
        left_s = budget.left_for("ranking")
        plans = affordable(plans, self.problem.graph, self.space, steps, left_s)
        if self._looks["measuring"].word == "busy":  # a call may take a hundred times as long
            plans = [*plans[:FEW], *plans[FEW:][-1:]]
        if left_s < LEAST_RANKING_S:
            return plans
        self._tell(steps, budget, "ranking")
        effort = budget.limited(Effort(budget_s=left_s / 2), "ranking")
        try:
            timings = self._timed(worker, plans, effort)
        except OutOfTime:
            return plans
        winner = fastest(plans, timings)
        if winner is None:
            raise NoViableCandidate(_why_none(self.problem, timings))
        winner = kept(self._incumbent, plans, timings, winner)
        timed = sorted(
            (timing.median_us, i) for i, timing in enumerate(timings) if isinstance(timing, Timing)
        )
        best, *others = [
            replace(plans[i], origin="measured")
            for i in (winner, *(i for _, i in timed if i != winner))
        ]
        return [self._refined(worker, steps, best, budget), best, *others]

    def _refined(self, worker: Worker, steps: StepSearch, plan: Plan, budget: Budget) -> Plan:
        """The plan with branches, and with runners-up of its steps, where the whole is faster."""
        graph = self.problem.graph
        left = swaps(plan, graph, self.space, steps.costs.outcomes)
        effort = budget.limited(Effort(budget_s=REFINING_S), "ranking")

        def time_plans(plans: Sequence[Plan]) -> Sequence[Timing | Rejected]:
            return self._timed(worker, plans, effort)

        with suppress(OutOfTime):  # it is good as it is
            if budget.left_for("ranking") > REFINING_S:
                plan = branched(plan, graph, self.space, time_plans)
            while left and budget.left_for("ranking") > REFINING_S:
                self._tell(steps, budget, "ranking")
                now, left = left[:SWAPS_AT_ONCE], left[SWAPS_AT_ONCE:]
                plan = improved(plan, graph, self.space, now, time_plans)
        return plan

    def _timed(
        self, worker: Worker, plans: Sequence[Plan], effort: Effort
    ) -> list[Timing | Rejected]:
        """All plans in turns; where one takes the worker along, those that run alone."""
        graph, seed = self.problem.graph, self.settings.seed
        try:
            return worker.time_programs(graph, plans, effort, seed=seed)
        except (MeasureTimeout, WorkerDied) as error:
            if len(plans) == 1:
                return [Rejected("crash", str(error))]
        short = replace(effort, budget_s=0.2)
        alone = [self._timed(worker, [plan], short)[0] for plan in plans]
        sound = [plan for plan, found in zip(plans, alone, strict=True) if _runs(found)]
        timings = iter(worker.time_programs(graph, sound, effort, seed=seed) if sound else ())
        return [next(timings) if _runs(found) else found for found in alone]

    def _raced(self, worker: Worker, plans: Sequence[Plan], budget: Budget) -> tuple[Plan, Race]:
        """The first plan that gets through its race: of the best ones, then of the slowest, mostly
        the framework's own kernels.

        What fails there was right and ran in every measurement before, so it is told.
        """
        contenders = list(dict.fromkeys((*plans[:MOST_RACES], plans[-1])))
        for place, plan in enumerate(contenders, 1):
            try:
                return plan, self._race(worker, plan, budget)
            except (MeasureTimeout, WorkerDied, WrongResult) as error:
                if place == len(contenders):
                    raise
                warnings.warn(f"a plan was given up in its race: {error}", stacklevel=2)
        raise AssertionError("there is always a plan")

    def _repeated(self, worker: Worker, plan: Plan, race: Race, budget: Budget) -> Duels:
        """The race, with more rounds where it is open who is faster; the safe way has the rest."""
        duels, left = duels_of(race), MOST_REPEATS
        while (open_ := undecided(duels)) and left and budget.left_for("racing") > LEAST_REPEAT_S:
            assert self._steps is not None
            self._tell(self._steps, budget, "racing")
            left -= 1
            try:
                duels = repeated(duels, self._race(worker, plan, budget, open_))
            except (MeasureTimeout, OutOfTime, WorkerDied, WrongResult):
                break  # what is known is enough to decide
        return duels

    def _captured(self) -> Plan | None:
        """The framework's own kernels as one graph, on a GPU."""
        if self.space.arch.kind != "cuda":
            return None
        plain = default_plan(self.problem.graph, self.space, network=self.problem.network)
        return replace(plain, origin="measured")

    def _race(
        self,
        worker: Worker,
        plan: Plan,
        budget: Budget,
        baselines: tuple[str, ...] | None = None,
    ) -> Race:
        """The plan against the framework's ways; those that compile for long need the time."""
        baselines = baselines or self.settings.baselines
        if baselines is None:
            known = baselines_for(plan.arch, self.problem.mode)
            baselines = tuple(name for name in known if _seconds_of(name) <= budget.left_s)
        effort = budget.limited(Effort(budget_s=min(budget.left_s / 3, RACE_S)), "racing")
        return worker.race(self.problem, plan, baselines, effort, self.settings.seed)

    def _contenders(self, steps: StepSearch) -> list[Plan]:
        graph, name = self.problem.graph, self.problem.network
        measured = any(isinstance(o, Measured) for o in steps.costs.outcomes.values())
        # Without a measured step the best cover is the plain plan, and finding that takes seconds.
        covers = steps.covers(COVERS_TO_RANK) if measured else []
        found = [plan_of(cover, self.problem, self.space) for _, cover in covers]
        by_hand = [hand_plan(graph, self.space, network=name, compiled=c) for c in (True, False)]
        plain = default_plan(graph, self.space, network=name)
        ordered = [*found, *by_hand]
        return distinct([*ordered, *self._known, plain])

    def _unraced(self) -> Result:
        """What calls find already stays; without that they run as they are, which needs no race."""
        self._looks["its end"] = self._machine.look()
        plain = plain_plan(self.problem, self.space)
        known = known_plan(plain, self._database, self._environment)
        if known is not None:
            return replace(self._result(known.plan, complete=True, race=None), known=known)
        self._database.put_plan(plain, self._environment)
        return self._result(plain, complete=True, race=None)

    def _tell(self, steps: StepSearch, budget: Budget, phase: str) -> None:
        self._report(steps.progress(budget, None, phase))

    def _result(self, plan: Plan, *, complete: bool, race: Race | None) -> Result:
        assert self._steps is not None
        outcomes = self._steps.costs.outcomes.values()
        measured = sum(isinstance(outcome, Measured) for outcome in outcomes)
        return Result(
            plan,
            complete,
            race,
            measured,
            len(outcomes) - measured,
            candidates=self._steps.candidates,
            exhausted=self._steps.complete,
            budget_s=self.settings.budget_s,
            spent_s=self._budget.spent_s,
            notes=tuple(noted(self._looks)),
        )


def _runs(found: Timing | Rejected) -> bool:
    return isinstance(found, Timing)


def _seconds_of(baseline: str) -> float:
    """What must be left for a baseline: those that compile for minutes are for `bench`."""
    return COMPILING_S.get(baseline, NEVER_S) if baseline.startswith("compile") else 0.0


def _with(duels: Duels, race: Race) -> Race:
    """The race with the ratio to its best baseline over all rounds that both ran."""
    best = race.best_baseline
    return race if best is None or race.ratio is None else replace(race, ratio=duels[best].ratio)


def _why_none(problem: Problem, timings: Sequence[Timing | Rejected]) -> str:
    reasons = "; ".join(f"{t.stage}: {t.reason}" for t in timings if isinstance(t, Rejected))
    return f"no plan for {problem.network} at batch {problem.batch} runs here: {reasons}"
