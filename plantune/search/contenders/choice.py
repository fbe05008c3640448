"""The second half of a search: ranks whole plans and races the best, until one is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from plantune.errors import OutOfTime
from plantune.measure.racing.race import Race
from plantune.plans.plan import Plan
from plantune.search.contenders.contender import IN_USE, Contenders, distinct
from plantune.search.contenders.of_covers import plan_of
from plantune.search.contenders.proposal import all_contenders, is_less_than_the_guess
from plantune.search.contenders.racing import Failed, compiled_ahead, race_first
from plantune.search.contenders.ranking import NOT_COMPARED, rank
from plantune.search.run import Run


@dataclass(frozen=True)
class Ranking:
    """Plans in the order in which they are raced, and what they were ranked among."""

    plans: Sequence[Plan]
    contenders: Contenders


@dataclass(frozen=True)
class Winner:
    """The plan that got through its race, with that."""

    plan: Plan
    race: Race


def ranked(run: Run, known: Contenders) -> tuple[Run, Ranking]:
    """Ranks the plans while another GPU compiles routes for their race: the run with those that are
    ready. What always runs is raced if all else fails.
    """
    ready = compiled_ahead(run)
    contenders = all_contenders(run, known)
    plans = distinct([*rank(run, contenders), run.sought.of_framework[0]])
    return replace(run, ahead=ready()), Ranking(plans, contenders)


def raced(run: Run, ranking: Ranking, failed: list[Failed]) -> Winner:
    """The first plan that gets through its race; what does not is added to `failed`. Raises
    OutOfTime if it would take the place of a guess that was not compared.
    """
    run.enter("racing")
    plan, race = race_first(run, ranking.plans, ranking.contenders.first(IN_USE), failed)
    if is_less_than_the_guess(run.sought, plan, ranking.plans):
        raise OutOfTime(NOT_COMPARED)
    return Winner(plan, race)


def best_so_far(run: Run) -> Plan | None:
    """The plan of the best cover, None before anything was measured."""
    if not run.steps.measured:
        return None
    cover = run.steps.covers(1)[0][1]
    return plan_of(cover, run.graph, run.space, network=run.problem.network)
