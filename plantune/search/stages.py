"""What a search does with whole plans: times them in turns, then races the winner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from plantune.base.outcome import Rejected
from plantune.base.warning import warn
from plantune.errors import (
    BuildError,
    CannotJudge,
    MeasureTimeout,
    NoViableCandidate,
    OutOfTime,
    WorkerDied,
    WrongResult,
)
from plantune.graph.graph import Graph
from plantune.graph.tracing.tape import Tape
from plantune.measure.machine_state import State
from plantune.measure.racing.race import Race
from plantune.measure.racing.routes import framework_routes
from plantune.measure.subject import Raced
from plantune.measure.timing import LEAST_SAMPLES, Effort, Timing
from plantune.measure.worker.client import Worker
from plantune.plans.plan import Plan
from plantune.plans.problem import Problem
from plantune.plans.written_words import MEASURED
from plantune.search import policy, ranking
from plantune.search.budget import Budget
from plantune.search.elsewhere import compiled_elsewhere, prove_elsewhere
from plantune.search.judgement import TimedPairs, pairs_of, repeated, undecided
from plantune.search.results import Report, SearchOptions
from plantune.search.step_search import StepSearch
from plantune.space.arch import Arch
from plantune.space.search_space import SearchSpace

# The time that must be left for a route of torch.compile to join the race; others always join.
NEVER_S = float("inf")
NOT_COMPARED = "the plan that calls use now was not compared"
Found = Timing | Rejected
# How a plan may fail in its race.
FAILURES = (BuildError, MeasureTimeout, WorkerDied, WrongResult)


@dataclass(frozen=True)
class Failed:
    """A plan that failed in its race, though it ran in every measurement before."""

    plan: Plan
    why: str


@dataclass(frozen=True)
class Run:
    """What all stages of a search share."""

    graph: Graph
    problem: Problem
    space: SearchSpace
    options: SearchOptions
    worker: Worker
    budget: Budget
    steps: StepSearch
    report: Report
    tape: Tape | None = None
    # Workers on other GPUs of the same kind, and the routes that one of them compiled meanwhile.
    others: Sequence[Worker] = ()
    ahead: frozenset[str] = frozenset()

    def enter(self, stage: str) -> None:
        """A stage begins."""
        self.budget.enter(stage)
        self.report(self.steps.progress(self.budget, None, stage))


def time_plans(run: Run, plans: Sequence[Plan], effort: Effort) -> list[Found]:
    """All plans in turns, without the machine's slow spells; if one crashes the worker, each alone,
    then the survivors in turns.
    """
    graph, seed = run.graph, run.options.seed
    try:
        return ranking.evened(run.worker.time_programs(graph, plans, effort, seed=seed))
    except (MeasureTimeout, WorkerDied) as error:
        if len(plans) == 1:
            return [Rejected("crash", str(error))]
    short = replace(effort, budget_s=policy.ALONE_S)
    alone = [time_plans(run, [plan], short)[0] for plan in plans]
    survivors = [p for p, found in zip(plans, alone, strict=True) if isinstance(found, Timing)]
    try:
        together = (
            run.worker.time_programs(graph, survivors, effort, seed=seed) if survivors else ()
        )
    except (MeasureTimeout, WorkerDied):  # their times alone say less, but what they are
        return alone
    timings = iter(ranking.evened(together))
    return [next(timings) if isinstance(found, Timing) else found for found in alone]


def compared(arch: Arch, seconds: float) -> Effort:
    """Plans in turns for so long and no longer: to repeat what slow spells of the machine made
    noisy left no time for the plans that may be the fastest, and took 23 of 60 s on a busy machine
    before anything was measured (2 cores, 2026-11-23).
    """
    known_to = policy.RANKED_TO[arch.kind]
    return Effort(budget_s=seconds, tolerance=known_to, retries=0, relative=True)


def makes_that_fit(kind: str, calls_us: float, seconds: float) -> int:
    """How often plans are made whose calls take so long together: the rounds that are timed in any
    case, with two calls of each make, should fit into these seconds.
    """
    round_s = 2 * LEAST_SAMPLES * calls_us / 1e6
    return max(1, min(policy.MAKES[kind], int(seconds / round_s)))


def time_makes(run: Run, plans: Sequence[Plan], effort: Effort, makes: int) -> list[Found]:
    """All plans in turns, each with the rounds of so many makes of it, which count alike."""
    return ranking.of_makes(_whole_makes(run, plans, effort, makes))


def _whole_makes(
    run: Run, plans: Sequence[Plan], effort: Effort, makes: int
) -> Sequence[Sequence[Found]]:
    found = time_plans(run, [*plans] * makes, effort)
    return ranking.whole([found[i : i + len(plans)] for i in range(0, len(found), len(plans))])


def rank(
    run: Run,
    plans: Sequence[Plan],
    before: Sequence[Plan],
    machine: State,
    built: Sequence[Plan] = (),
    needed: Plan | None = None,
) -> list[Plan]:
    """The plans that ran: the winner improved, the winner, then the others, the fastest first. What
    is not clearly faster than the plans `before` does not win.

    Without time to measure them, the plans in their estimated order, the best first. Raises
    OutOfTime if there is none for the `needed` one of them.
    """
    left_s = run.budget.left_for("ranking")
    plans = ranking.affordable(plans, run.graph, run.space, run.steps, left_s, built)
    _require_among(plans, needed)
    if machine.word == "busy":  # a call may take a hundred times as long
        plans = [*plans[: policy.FEW_PLANS], *plans[policy.FEW_PLANS :][-1:]]
    if left_s < policy.LEAST_RANKING_S:
        return plans
    run.enter("ranking")
    arch = run.space.arch
    effort = run.budget.limited(
        compared(arch, policy.RANKED_AT_FIRST[arch.kind] * left_s), "ranking"
    )
    try:
        timings = time_plans(run, plans, effort)
    except OutOfTime:
        return plans
    pairs = list(zip(plans, timings, strict=True))
    for plan, found in pairs:
        if plan in built and isinstance(found, Rejected):
            why = f"{found.stage}: {found.reason}"
            text = f"a plan that was timed at first could not be timed beside the others: {why}"
            warn(text)
    _require_among([plan for plan, found in pairs if not ranking.is_late(found)], needed)
    return _ranked(run, plans, _close_again(run, plans, timings), before)


def _require_among(plans: Sequence[Plan], needed: Plan | None) -> None:
    """Raises OutOfTime if there is a plan that is needed and these do not include it."""
    if needed is not None and not any(ranking.choose_alike(needed, plan) for plan in plans):
        raise OutOfTime(NOT_COMPARED)


def _ranked(
    run: Run, plans: Sequence[Plan], timings: Sequence[Found], before: Sequence[Plan]
) -> list[Plan]:
    """The plans in the order that `rank` gives."""
    winner = ranking.fastest(plans, timings)
    if winner is None:
        raise NoViableCandidate(_why_none(run.problem, timings))
    winner = ranking.kept(before, plans, timings, winner)
    timed = sorted((t.median_us, i) for i, t in enumerate(timings) if isinstance(t, Timing))
    order = (winner, *(i for _, i in timed if i != winner))
    ranked = [replace(plans[i], origin=MEASURED) for i in order]
    run.steps.whole_us = timed[0][0]
    return [_improved(run, ranked[0], timed[0][0]), *ranked]


def _close_again(run: Run, plans: Sequence[Plan], timings: Sequence[Found]) -> list[Found]:
    """The times with further makes and rounds of those plans alone that may be the fastest: among
    ten plans they had few, and luck chose (three searches with other seeds should end alike).
    """
    arch, kind = run.space.arch, run.space.arch.kind
    found, places = list(timings), ranking.close(timings, kind)
    left_s = run.budget.left_for("ranking")
    if len(places) < 2 or left_s < policy.LEAST_RANKING_S:
        return found
    effort = run.budget.limited(compared(arch, policy.CLOSE_PART[kind] * left_s), "ranking")
    calls_us = sum(t.median_us for t in (found[i] for i in places) if isinstance(t, Timing))
    makes = makes_that_fit(kind, calls_us, effort.budget_s)
    try:
        made = _whole_makes(run, [plans[i] for i in places], effort, makes)
    except OutOfTime:
        return found
    again = dict(zip(places, ranking.of_makes(made), strict=True))
    return ranking.with_more(found, again, len(made))


def _improved(run: Run, plan: Plan, call_us: float) -> Plan:
    """The plan with branches, and with the runners-up of its steps, if the whole is faster; a call
    takes about so long.
    """
    graph, space, budget = run.graph, run.space, run.budget
    left = ranking.swaps(plan, graph, space, run.steps.costs.outcomes)
    effort = replace(compared(space.arch, policy.REFINING_S), tolerance=policy.IMPROVED_TO)
    effort = budget.limited(effort, "ranking")

    def timed(plans: Sequence[Plan]) -> Sequence[Found]:
        left_s, kind = budget.left_for("ranking"), space.arch.kind
        # Of many the best are looked for; of two one is chosen.
        makes = makes_that_fit(kind, 2 * call_us, left_s) if len(plans) == 2 else 1
        return time_makes(run, plans, effort, makes)

    with suppress(OutOfTime):  # it is good as it is
        if budget.left_for("ranking") > policy.REFINING_S:
            plan = ranking.branched(plan, graph, space, timed)
        while left and budget.left_for("ranking") > policy.REFINING_S:
            run.enter("ranking")
            now, left = left[: policy.SWAPS_AT_ONCE], left[policy.SWAPS_AT_ONCE :]
            plan = ranking.improved(plan, graph, space, now, timed)
    return plan


def race_first(
    run: Run, plans: Sequence[Plan], in_use: Plan | None = None, failed: list[Failed] | None = None
) -> tuple[Plan, Race]:
    """The first plan that gets through its race: of the best ones, then the one `in_use`, then the
    slowest, which mostly has the framework's own kernels. What fails before is added to `failed`.

    Raises NoViableCandidate if none does, and CannotJudge: what the framework does not compute
    itself, no plan can be compared with.
    """
    failed = [] if failed is None else failed
    known = [plan for plan in plans if in_use is not None and ranking.choose_alike(plan, in_use)]
    for plan in dict.fromkeys((*plans[: policy.MOST_RACES], *known, plans[-1])):
        try:
            return plan, _proved(run, plan, _race(run, plan))
        except FAILURES as error:
            failed.append(Failed(plan, str(error)))
    reasons = "; ".join(dict.fromkeys(each.why.partition("\n")[0] for each in failed))
    raise NoViableCandidate(f"no plan got through its race: {reasons}")


def _proved(run: Run, plan: Plan, race: Race) -> Race:
    """The race of a plan that every other worker proved too; raises what `_race` raises where one
    finds it wrong.
    """
    if run.others:
        run.enter("proving")
        prove_elsewhere(run.others, Raced(run.problem, run.tape), plan, run.budget)
    return race


def race_again(run: Run, plan: Plan, race: Race) -> TimedPairs:
    """The plan against each route, with more rounds while it is open who is faster."""
    pairs, left = pairs_of(race), policy.MOST_REPEATS
    while (
        (routes := undecided(pairs))
        and left
        and run.budget.left_for("racing") > policy.LEAST_REPEAT_S
    ):
        run.enter("racing")
        left -= 1
        try:
            pairs = repeated(pairs, _race(run, plan, routes))
        except (CannotJudge, OutOfTime, *FAILURES):
            break  # what is known is enough to decide
    return pairs


def compiled_ahead(run: Run) -> Callable[[], frozenset[str]]:
    """Has the routes compiled on another GPU while plans are ranked on the first one; gives which
    of them are ready when it is asked.
    """
    known = run.options.routes or framework_routes(run.problem.arch, run.problem.mode)
    wanted = [name for name in known if name in policy.COMPILING_S]
    raced = Raced(run.problem, run.tape)
    return compiled_elsewhere(run.others, raced, wanted, run.budget, run.options.seed)


def _race(run: Run, plan: Plan, routes: tuple[str, ...] | None = None) -> Race:
    """The plan against the routes; one that compiles for long joins only if there is time."""
    left_s = run.budget.left_s
    if left_s < policy.LEAST_RACE_S:
        raise OutOfTime("there was no time left for a race")
    routes = routes or run.options.routes
    if routes is None:
        routes = _joining(run, left_s)
    effort = run.budget.limited(Effort(budget_s=min(left_s / 3, policy.RACE_S)), "racing")
    seed = run.options.seed
    return run.worker.race(Raced(run.problem, run.tape), plan, routes, effort, seed)


def _joining(run: Run, left_s: float) -> tuple[str, ...]:
    """The routes for which there is time, one after the other: what compiles when the time is up
    takes the whole race along, and with it what the search found. The later ones are stronger.
    """
    known = framework_routes(run.problem.arch, run.problem.mode)
    joining = set()
    for name in reversed(known):
        needed_s = _needed_s(run, name)
        if needed_s <= left_s:
            joining.add(name)
            left_s -= needed_s
    return tuple(name for name in known if name in joining)


def _needed_s(run: Run, route: str) -> float:
    """What must be left for a route: those that compile for minutes are for `bench`."""
    if not route.startswith("compile"):
        return 0.0
    if route in run.ahead:
        needed_s = policy.COMPILED_AHEAD_S
    else:
        forward = run.graph.nodes[: run.graph.backward_from]
        needed_s = max(
            policy.COMPILING_S.get(route, NEVER_S), policy.COMPILING_NODE_S * len(forward)
        )
    return needed_s * (policy.BOTH_PASSES if run.problem.mode == "train" else 1)


def _why_none(problem: Problem, timings: Sequence[Found]) -> str:
    reasons = "; ".join(f"{t.stage}: {t.reason}" for t in timings if isinstance(t, Rejected))
    return f"no plan for {problem.network} at batch {problem.batch} runs here: {reasons}"
