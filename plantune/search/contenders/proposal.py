"""Which plans a search compares: those that are known before, then all that are ranked."""

from __future__ import annotations

from collections.abc import Sequence

from plantune.devices.machine import Environment
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.plan import Plan
from plantune.search import policy
from plantune.search.contenders.affordable import affordable
from plantune.search.contenders.contender import (
    COVER,
    FASTEST,
    FRAMEWORK,
    GUESS,
    HAND,
    IN_USE,
    KNOWN,
    NEAREST,
    STORED,
    TIMED,
    UNTIMED,
    Contender,
    Contenders,
    choose_alike,
    distinct,
    labelled,
)
from plantune.search.contenders.dearer import without_dearer
from plantune.search.contenders.fitting import fitted
from plantune.search.contenders.known import incumbent, known_plans
from plantune.search.contenders.of_covers import plan_of
from plantune.search.run import Run
from plantune.search.sought import Sought


def known_contenders(
    sought: Sought, environment: Environment, database: PlanDatabase, *, shipped: bool
) -> Contenders:
    """The plan that calls use, then the nearest known ones, and the guess, which calls use if no
    plan is stored. What is stored and does not run here any more is not in use.
    """
    stored = incumbent(sought, environment, database)
    known = known_plans(sought, environment, database, shipped=shipped)
    mine = None if stored is None else fitted(stored, sought.graph, sought.space)
    found = Contenders.of([*labelled(KNOWN, [mine, *known]), *labelled(GUESS, [sought.guess])])
    if stored is None:
        return found.marked(IN_USE, [sought.guess])
    return found.marked(IN_USE, [stored]).marked(STORED, [stored])


def to_measure_first(sought: Sought, known: Contenders) -> list[Plan]:
    """The best plan that was timed. Where calls build no guess, also the plan by hand: then
    searches with other seeds, and on machines that others disturb, end with that or better. Without
    either also eager's calls, so that what looks better than they are is compared with measured
    times.
    """
    fastest = known.plans(FASTEST)
    if sought.guess is not None:
        return fastest
    plain = () if fastest else sought.of_framework
    return distinct([*fastest, sought.by_hand(), *plain])


def all_contenders(run: Run, known: Contenders) -> Contenders:
    """The plan that calls use, the best known one, the best cover, those picked by hand and of the
    framework's kernels, the other covers and known ones, and the framework's as callers bring
    images: on a busy machine the first ones are all that is ranked, and the sums of steps say least
    there. What is clearly slower than the best cover by measured times is skipped, unless calls use
    it or it was found by a search.
    """
    kept = _in_time(run, known)
    nearest = next((each.plan for each in kept if IN_USE not in each.labels), None)
    best = known.having(FASTEST) or kept
    covers = labelled(COVER, _of_covers(run))
    by_hand = labelled(HAND, map(run.sought.by_hand, policy.SKIPPED))
    plain, *plain_too = labelled(FRAMEWORK, run.sought.of_framework)
    some = [*by_hand[:1], *plain_too, *by_hand[1:], *covers[1:]]
    others, last = (_worthwhile(run, each) for each in (some, [plain]))
    first = [*known.having(IN_USE), *known.having(GUESS), *best[:1], *covers[:1]]
    return Contenders.of([*first, *others, *kept, *last]).marked(NEAREST, [nearest])


def _in_time(run: Run, known: Contenders) -> list[Contender]:
    """Of the known plans those that were timed, and those that were built since then or take little
    of the time to rank.
    """
    limit_s = policy.UNTIMED * run.budget.left_for("ranking")
    untimed = known.plans(UNTIMED)
    built = affordable(untimed, run.graph, run.space, run.steps, limit_s)
    return [each for each in known.items if TIMED in each.labels or each.plan in built]


def _of_covers(run: Run) -> list[Plan]:
    """Of the best covers. Without a measured step the best one is the framework's plan, and finding
    it takes seconds.
    """
    covers = run.steps.covers(policy.COVERS_TO_RANK) if run.steps.measured else []
    network = run.problem.network
    return [plan_of(cover, run.graph, run.space, network=network) for _, cover in covers]


def _worthwhile(run: Run, contenders: Sequence[Contender]) -> list[Contender]:
    plans = distinct(each.plan for each in contenders)
    kept = without_dearer(plans, run.graph, run.space, run.steps)
    return [each for each in contenders if each.plan in kept]


def is_less_than_the_guess(sought: Sought, plan: Plan, ranked: Sequence[Plan]) -> bool:
    """Whether the framework's own kernels are left without having been compared with the guess:
    kept as a plan they would take its place.
    """
    guess = sought.guess
    if guess is None or not choose_alike(plan, sought.of_framework[0]):
        return False
    return not any(choose_alike(guess, other) for other in ranked)
