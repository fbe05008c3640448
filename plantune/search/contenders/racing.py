"""Races the best plans until one gets through, and again where it is open who is faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plantune.errors import (
    BuildError,
    CannotJudge,
    MeasureTimeout,
    NoViableCandidate,
    OutOfTime,
    WorkerDied,
    WrongResult,
)
from plantune.measure.racing.race import Race
from plantune.measure.racing.routes import framework_routes
from plantune.measure.timing import Effort
from plantune.plans.plan import Plan
from plantune.search import policy
from plantune.search.contenders.contender import choose_alike
from plantune.search.contenders.elsewhere import compiled_elsewhere, prove_elsewhere
from plantune.search.contenders.judgement import TimedPairs, pairs_of, repeated, undecided
from plantune.search.run import Run

# The time that must be left for a route of torch.compile to join the race; others always join.
NEVER_S = float("inf")
# How a plan may fail in its race.
FAILURES = (BuildError, MeasureTimeout, WorkerDied, WrongResult)


@dataclass(frozen=True)
class Failed:
    """A plan that failed in its race, though it ran in every measurement before."""

    plan: Plan
    why: str


def race_first(
    run: Run, plans: Sequence[Plan], in_use: Plan | None = None, failed: list[Failed] | None = None
) -> tuple[Plan, Race]:
    """The first plan that gets through its race: of the best ones, then the one `in_use`, then the
    slowest, which mostly has the framework's own kernels. What fails before is added to `failed`.

    Raises NoViableCandidate if none does, and CannotJudge: what the framework does not compute
    itself, no plan can be compared with.
    """
    failed = [] if failed is None else failed
    known = [plan for plan in plans if in_use is not None and choose_alike(plan, in_use)]
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
        prove_elsewhere(run.others, run.sought.raced, plan, run.budget)
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
    raced = run.sought.raced
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
    return run.worker.race(run.sought.raced, plan, routes, effort, seed)


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
