"""A search: measures steps, ranks whole plans, races the winner, and keeps everything it finds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

from plantune.devices.cuda.capture import no_collection
from plantune.devices.machine import Environment
from plantune.errors import MeasureTimeout, OutOfTime, WorkerDied
from plantune.graph import Attrs, Graph
from plantune.graph.tracing.tape import Tape
from plantune.measure.machine_state import gpu_watcher, machine_for
from plantune.measure.racing.race import Race
from plantune.measure.subject import Raced
from plantune.measure.worker.client import Worker
from plantune.plans.checked_plan import check_plan
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.rows import Found
from plantune.plans.guess import framework_plans, guessed_plan, hand_plan
from plantune.plans.plan import Plan
from plantune.plans.planner.cover import Cover
from plantune.plans.problem import Problem
from plantune.search import policy
from plantune.search.budget import Budget
from plantune.search.builds import Builds, builds_for
from plantune.search.dearer import without_dearer
from plantune.search.elsewhere import prove_elsewhere, start_all
from plantune.search.endings import NOTHING_LEFT, REFUTED, Endings, why_needless
from plantune.search.judgement import (
    TimedPairs,
    evidence_of,
    judged,
    pairs_of,
    plain_graph,
    race_notes,
    with_all_rounds,
)
from plantune.search.kept_times import with_times
from plantune.search.known import fitted, incumbent, known_plans
from plantune.search.machine_log import MachineLog
from plantune.search.measuring import CACHES, StoredTrials, WorkerMeasurer
from plantune.search.ranking import affordable, choose_alike, distinct, is_deterministic, plan_of
from plantune.search.results import Report, Result, SearchOptions, silent
from plantune.search.shared.board import Board
from plantune.search.shared.joint import plan_of_others
from plantune.search.stages import (
    NOT_COMPARED,
    Run,
    compiled_ahead,
    race_again,
    race_first,
    rank,
)
from plantune.search.step_search import StepSearch
from plantune.search.studies import Studies
from plantune.search.warm_start import WarmStart, quick_kernels, warm_start
from plantune.search.worker_pool import WorkerPool
from plantune.space.search_space import load_search_space


class Search:
    """One search, whose budget begins when it is made. `run` may be interrupted; `partial` returns
    what was found until then. The `tape` is that of a network without a name, for its race.
    """

    def __init__(
        self,
        graph: Graph,
        problem: Problem,
        options: SearchOptions,
        database: PlanDatabase,
        environment: Environment,
        report: Report = silent,
        *,
        tape: Tape | None = None,
    ) -> None:
        self.graph, self.problem = graph, problem
        self.options = options
        self.space = load_search_space(problem.arch)
        self._database = database
        self._environment = environment
        self._report = report
        self._tape = tape
        # What is shared with other searches, if it is.
        self.board: Board | None = None
        gpu = options.slots[0].gpu if options.slots else None
        watcher = gpu_watcher(problem.arch, gpu)
        self._log = MachineLog(machine_for(self.space.arch.kind, watcher))
        self._budget = Budget(options.budget_s, spent_s=options.spent_s)
        self._steps: StepSearch | None = None
        self._best: Plan | None = None
        self._warm = WarmStart()
        self._incumbent: Plan | None = None
        self._guess: Plan | None = None
        self._endings = Endings(graph, self.space, problem.network, database, environment)
        # What got through its race, and whether it is kept already.
        self._raced: tuple[Plan, Race] | None = None
        self._kept: Result | None = None

    def run(self, worker: Worker, *others: Worker) -> Result:
        """Searches to the end and keeps the plan, the framework's if no other one is left. The
        first worker ranks and races, the others measure beside it and prove the plan too.
        """
        if (why := why_needless(self.graph, self.problem)) is not None:
            return self._nothing_left(why)
        try:
            with builds_for(self.space.arch, worker, *others) as builds:
                known = self._known_plans()
                run = self._started(known, builds, worker, *others)
                run.enter("measuring")
                self._time_known_plans(run, known)
                run.enter("measuring")
                self._begin(run)
                run.steps.run(run.budget, self._report)
            state = self._log.snapshot("measuring")
            if not run.budget.left_s:
                raise OutOfTime("the time was over before anything was compared")
            if (plan := self._found_elsewhere(run)) is not None:
                return self._taken(run, plan)
            routes = compiled_ahead(run)
            in_use = self._in_use(known)
            known = self._contending(run, known)
            contenders = self._contenders(run.steps, known, in_use)
            # What a longer search found elsewhere is worth more than luck in a few rounds.
            nearest = next((plan for plan in known if plan is not in_use), None)
            before = distinct(filter(None, [self._incumbent, nearest or in_use]))
            timed = self._warm.timed
            plans = rank(run, contenders, before, state, built=timed, needed=in_use)
            # What always runs is raced if all else fails.
            plans = distinct([*plans, self._frameworks[0]])
            self._log.snapshot("ranking")
            self._best = plans[0]
            run.enter("racing")
            failed = self._endings.failed
            plan, race = race_first(replace(run, ahead=routes()), plans, in_use, failed)
            if self._is_less_than_the_guess(plan, plans):
                raise OutOfTime(NOT_COMPARED)
        except OutOfTime:
            return self._without_race()
        except NOTHING_LEFT as error:
            return self._nothing_left(str(error))
        self._raced = plan, race
        self._endings.warn_of_failed()
        state = self._log.snapshot("race")
        pairs = race_again(run, plan, race)
        race = with_all_rounds(race, pairs)
        plan = self._finished(plan, race, pairs)
        with suppress(MeasureTimeout, OutOfTime, WorkerDied):  # it is as good without them
            plan = self._with_times(run, plan)
        gaps = race_notes(race, run.steps.best(), run.steps.framework(), state)
        self._kept = self._keep_raced(plan, race, gaps)
        while not self._publish(plan):
            if (theirs := self._found_elsewhere(run)) is not None:
                return self._taken(run, theirs)
        return self._kept

    def partial(self) -> Result | None:
        """What is best so far: the plan that got through its race, else one that is kept as
        partial; None before anything was measured.
        """
        if self._kept is not None:
            return replace(self._kept, complete=False)
        if self._raced is not None:
            plan, race = self._raced
            plan = self._finished(plan, race, pairs_of(race))
            return replace(self._keep_raced(plan, race), complete=False)
        steps = self._steps
        if steps is None or (self._best is None and not steps.measured):
            return None
        plan = self._best or self._plan_of(steps.covers(1)[0][1])
        self._database.put_plan(plan, self._environment, partial=True)
        return self._result(plan, complete=False)

    def _keep_raced(self, plan: Plan, race: Race, notes: Sequence[str] = ()) -> Result:
        self._database.put_plan(plan, self._environment)
        return self._result(plan, race=race, notes=notes)

    def _started(
        self, known: Sequence[Plan], builds: Builds, worker: Worker, *others: Worker
    ) -> Run:
        options, budget = self.options, self._budget
        scope = f"{self._environment.key} {CACHES[self.space.arch.kind]}"
        storage = options.storage if self.board is None else None  # a board has all trials
        studies = Studies(
            storage, options.seed, scope, fresh=options.fresh, arch=self.space.arch.name
        )
        machine, space, seed = self._log.machine, self.space, options.seed
        workers = (worker, *others)
        measurers = [WorkerMeasurer(each, space, seed, budget, machine) for each in workers]
        pool = WorkerPool(measurers, [slot.name for slot in options.slots], self.board)
        store = StoredTrials(self._database, self._environment, options.fresh)
        graph = self.graph
        # They are compiled while all candidates are listed.
        first = distinct([*known[:1], *filter(None, [self._guess])])
        builds.want(c for plan in first for c in quick_kernels(plan, graph, space))
        with no_collection():  # looking through all that was listed takes a fifth of the time
            steps = self._steps = StepSearch(
                graph, self.space, pool, store, builds=builds, studies=studies
            )
        budget.race_s = self._race_s(steps.framework().us)
        start_all(workers, budget.cut_at("racing"))
        return Run(
            self.graph,
            self.problem,
            self.space,
            options,
            worker,
            budget,
            steps,
            self._report,
            self._tape,
            others,
        )

    def _known_plans(self) -> list[Plan]:
        """Plans that are known before: the one that calls use, the nearest ones, and the guess."""
        graph, space, environment = self.graph, self.space, self._environment
        problem, database = self.problem, self._database
        self._guess = guessed_plan(graph, space, network=problem.network)
        self._incumbent = incumbent(graph, problem, environment, database)
        shipped = self.options.shipped
        known = known_plans(graph, space, problem, environment, database, shipped=shipped)
        mine = self._incumbent and fitted(self._incumbent, graph, space)
        return distinct(filter(None, [mine, *known, self._guess]))

    def _time_known_plans(self, run: Run, known: Sequence[Plan]) -> None:
        self._warm = warm_start(run, known, self._guess)
        if not self._warm.timed:
            return
        self._best = self._warm.timed[0]
        run.steps.whole_us = us = self._warm.fastest_us
        # On busy cores a call may take a hundred times what its steps are thought to take.
        run.budget.race_s = max(run.budget.race_s, self._race_s(us))

    def _race_s(self, call_us: float) -> float:
        calls_s = policy.CALLS_IN_A_RACE[self.space.arch.kind] * call_us / 1e6
        return max(calls_s, policy.TRAINING_S if self.problem.mode == "train" else 0.0)

    def _begin(self, run: Run) -> None:
        """Measures the steps of the best plan that was timed. Where calls build no guess, also
        those of the plan by hand: then searches with other seeds, and on machines that others
        disturb, end with that or better. Without either also eager's calls, so that what looks
        better than they are is compared with measured times.
        """
        first = [*self._warm.timed[:1]]
        if self._guess is None:
            first.append(hand_plan(self.graph, self.space, network=self.problem.network))
            first += [] if self._warm.timed else self._frameworks
        for plan in distinct(first):
            run.steps.begin_with(plan, run.budget, self._report)

    @cached_property
    def _frameworks(self) -> tuple[Plan, ...]:
        """The framework's own kernels, as callers bring images and in channels_last."""
        return framework_plans(self.graph, self.space, network=self.problem.network)

    def _plan_of(self, cover: Cover) -> Plan:
        return plan_of(cover, self.graph, self.space, network=self.problem.network)

    def _in_use(self, known: Sequence[Plan]) -> Plan | None:
        """The plan that calls use now, without one the guess: what was not compared with it does
        not take its place. An incumbent that does not run here any more is none.
        """
        plan = self._incumbent
        if plan is None:
            return self._guess
        return next((other for other in known if choose_alike(plan, other)), None)

    def _contending(self, run: Run, known: Sequence[Plan]) -> list[Plan]:
        """Of the known plans those that were timed, and those that were built since then or take
        little of the time to rank.
        """
        limit_s = policy.UNTIMED * run.budget.left_for("ranking")
        untimed = self._warm.untimed
        built = affordable(untimed, self.graph, self.space, run.steps, limit_s)
        return [plan for plan in known if plan in self._warm.timed or plan in built]

    def _contenders(
        self, steps: StepSearch, known: Sequence[Plan], in_use: Plan | None
    ) -> list[Plan]:
        """The plan that calls use, the best known one, the best cover, those picked by hand and of
        the framework's kernels, the other covers and known ones, and the default one: on a busy
        machine the first ones are all that is ranked, and the sums of steps say least there. What
        is clearly slower than the best cover by measured times is left out, unless calls use it or
        it was found by a search.
        """
        graph, space, name = self.graph, self.space, self.problem.network
        # Without a measured step the best cover is the default plan, and finding it takes seconds.
        covers = steps.covers(policy.COVERS_TO_RANK) if steps.measured else []
        found = [self._plan_of(cover) for _, cover in covers]
        by_hand = [hand_plan(graph, space, network=name, without=w) for w in policy.SKIPPED]
        best = [*self._warm.timed, *known][:1]
        first = [*filter(None, [in_use, self._guess]), *best, *found[:1]]
        plain, *plain_too = self._frameworks
        some = distinct([*by_hand[:1], *plain_too, *by_hand[1:], *found[1:]])
        others, last = (without_dearer(p, graph, space, steps) for p in (some, [plain]))
        return distinct([*first, *others, *known, *last])

    def _is_less_than_the_guess(self, plan: Plan, ranked: Sequence[Plan]) -> bool:
        """Whether the framework's own kernels are left without having been compared with the guess:
        kept as a plan they would take its place.
        """
        guess = self._guess
        if guess is None or not choose_alike(plan, self._frameworks[0]):
            return False
        return not any(choose_alike(guess, other) for other in ranked)

    def _finished(self, plan: Plan, race: Race, pairs: TimedPairs) -> Plan:
        """The plan with its evidence, and who runs it."""
        assert self._steps is not None
        graph, space = self.graph, self.space
        captured = plain_graph(graph, space, network=self.problem.network)
        plan = judged(replace(plan, evidence=evidence_of(race)), pairs, captured)
        same = is_deterministic(plan, graph, space, self._steps.costs.outcomes)
        found = {"deterministic": int(same), "search_s": round(self._budget.spent_s, 1)}
        return replace(plan, evidence=Attrs({**plan.evidence, **found, **self._log.evidence()}))

    def _with_times(self, run: Run, plan: Plan) -> Plan:
        """The plan with what was measured of its steps."""
        outcomes, rooflines = run.steps.costs.outcomes, run.worker.rooflines
        arch = self.problem.arch
        return with_times(plan, self.graph, self.space, outcomes, lambda s: rooflines(s, arch))

    def _without_race(self) -> Result:
        """The plan that calls use already stays; if there is none, the network runs as it is, which
        needs no race.
        """
        self._log.snapshot("its end")
        self._endings.warn_of_failed()
        plan, known = self._endings.without_race()
        self._publish(plan)
        return self._result(plan, known=known)

    def _nothing_left(self, why: str) -> Result:
        """The framework runs the network; other searches of a study may find more."""
        self._log.snapshot("its end")
        return self._result(self._endings.nothing_left(), nothing_left=why)

    def _found_elsewhere(self, run: Run) -> Plan | None:
        """Where searches share a study, the plan of the one that ranked and raced, after all of
        them have measured what they can; None if that is for this search to do.
        """
        if self.board is None:
            return None
        run.enter("waiting for others")
        plan, seconds = plan_of_others(self.board, run.steps.observe_others, self._environment)
        run.budget.exclude(seconds)
        if plan is not None:
            check_plan(plan, self.graph, self.space)
        return plan

    def _taken(self, run: Run, plan: Plan) -> Result:
        """Keeps a plan that another search found, once every worker here has proved it."""
        run.enter("proving")
        raced, workers = Raced(self.problem, self._tape), (run.worker, *run.others)
        try:
            prove_elsewhere(workers, raced, plan, Budget(policy.PROVING_S))
        except REFUTED as error:
            return self._nothing_left(f"the plan that another search found failed here: {error}")
        self._database.put_plan(plan, self._environment)
        return self._result(plan, elsewhere=True)

    def _publish(self, plan: Plan) -> bool:
        """Gives the plan to the others; False if one of them may do so, see Board.publish."""
        ms = plan.evidence.get("median_ms", 0.0)
        value = float(ms) if isinstance(ms, (int, float)) else 0.0
        return self.board is None or self.board.publish(plan.dumps(), value)

    def _result(
        self,
        plan: Plan,
        *,
        complete: bool = True,
        race: Race | None = None,
        known: Found | None = None,
        notes: Sequence[str] = (),
        elsewhere: bool = False,
        nothing_left: str | None = None,
    ) -> Result:
        return Result(
            plan,
            complete,
            race,
            **({} if self._steps is None else self._steps.counts()),
            budget_s=self.options.budget_s,
            known=known,
            spent_s=self._budget.spent_s,
            stages_s=self._budget.stages_s,
            notes=(*self._log.warnings(), *notes),
            elsewhere=elsewhere,
            nothing_left=nothing_left,
        )
