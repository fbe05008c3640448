"""`plantune explain`: why a plan is as it is, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from plantune.cli.console import Console, bold
from plantune.cli.lookup import Chosen, chosen_plan, database
from plantune.cli.options import bundled, common_options, example, plan_options
from plantune.plans.raced_routes import RacedRoutes
from plantune.plans.standing import Standing
from plantune.plans.workload import Workload
from plantune.plans.written_words import PREDICTED, ROUTE
from plantune.report.tables import counted, percent

if TYPE_CHECKING:
    from plantune.graph.step import Step
    from plantune.kernels.family import Candidate
    from plantune.report.covers import Trials
    from plantune.report.packing import Packing
    from plantune.report.steps import StepStory

# Steps that are shown unless all of them are asked for.
MOST = 10


@dataclass(frozen=True)
class Wanted:
    """Which steps to show, and how much of each."""

    wanted: str | None
    every: bool
    whole: bool


@click.command(
    "explain",
    epilog=example(
        "plantune explain --batch 8 | less", "plantune explain 3 --step layers.0 --whole"
    ),
)
@common_options()
@plan_options
@click.option("--step", "wanted", metavar="TEXT", help="Only steps with this in a node's name.")
@click.option("--all", "every", is_flag=True, help=f"All steps, not only the {MOST} longest.")
@click.option("--whole", is_flag=True, help="Every candidate on a line of its own.")
@bundled(Wanted, "show")
def explain_command(
    console: Console, place: Path | None, workload: Workload, id: int | None, show: Wanted
) -> None:
    """Shows why a plan is as it is: the steps that take longest, and what else was tried for each.

    For each step there are the chosen candidate, other kernels for the same step, its ops in
    smaller steps, and fusions with its neighbours, with the reason why each lost. The plan is the
    one for the options, or the one with this ID. The roofline is what arithmetic and traffic take
    at the best of the machine where the times are from. A plan brings the time of each step, its
    roofline and its runner-up from the search that found it.
    """
    from plantune.report.packing import packing_of
    from plantune.space.arch import load_arch

    chosen = chosen_plan(place, workload, id)
    stories = _stories(place, chosen)
    packing = packing_of([(s.step, s.chosen) for s in stories], load_arch(chosen.workload.arch))
    if console.json is None:
        _show(console, chosen, stories, packing, show)
    named = [s for s in stories if _is_wanted(s, show.wanted)]
    console.emit(
        {
            "plan_id": chosen.id,
            "match": chosen.match,
            "origin": chosen.plan.written_origin,
            ROUTE: chosen.plan.route,
            "branches": chosen.plan.branches,
            "evidence": dict(chosen.plan.evidence),
            **RacedRoutes.of(chosen.plan.evidence).to_json(),
            "nchw_packing": None if packing is None else packing.to_json(),
            "steps": [story.to_json() for story in _required(named, show)],
        }
    )


def _stories(place: Path | None, chosen: Chosen) -> list[StepStory]:
    """In the order of the plan."""
    from plantune.graph.fusions import all_fusions
    from plantune.graph.partition import alternatives
    from plantune.kernels.registry import estimate_us
    from plantune.plans.precisions import trial_key
    from plantune.report.covers import other_covers
    from plantune.report.steps import StepStory, plan_steps, step_roofline_us
    from plantune.space.arch import load_arch

    plan, arch = chosen.plan, load_arch(chosen.workload.arch)
    steps = plan_steps(plan, chosen.workload.graph)
    known: dict[str, Trials] = {}
    with database(place) as opened:
        others = alternatives(chosen.workload.graph, tuple(all_fusions()))
        for step in (*(step for step, _ in steps), *others):
            if step.signature not in known:
                known[step.signature] = opened.trials(
                    trial_key(step, arch.name), chosen.environment
                )
    kept = {name: choice.times for choice in plan.choices for name in choice.nodes}

    def story(step: Step, candidate: Candidate) -> StepStory:
        times = kept[step.name]
        roofline_us = step_roofline_us(step, arch.name) if times is None else times.roofline_us
        guess_us = estimate_us(step, candidate, arch)
        return StepStory(step, candidate, known[step.signature], roofline_us, guess_us, times)

    alone = [story(step, candidate) for step, candidate in steps]
    planned = [(story.step, story.chosen_us) for story in alone]
    tried = [(step, known[step.signature]) for step in others if known[step.signature]]
    return [replace(s, covers=other_covers(s.step, planned, tried)) for s in alone]


def _is_wanted(story: StepStory, text: str | None) -> bool:
    return text is None or any(text in node.name for node in story.step.nodes)


def _required(named: list[StepStory], show: Wanted) -> list[StepStory]:
    if not named:
        raise click.BadParameter(f"no step has {show.wanted!r} in its name", param_hint="'--step'")
    return named


def _show(
    console: Console,
    chosen: Chosen,
    stories: Sequence[StepStory],
    packing: Packing | None,
    show: Wanted,
) -> None:
    from plantune.report.story import story_text, summary_table, title

    by_time = sorted(stories, key=lambda story: -story.about_us)
    named = _required([s for s in by_time if _is_wanted(s, show.wanted)], show)
    shown = named if show.every or show.wanted is not None else named[:MOST]
    total_us = sum(story.about_us for story in stories)
    _show_plan(console, chosen, packing)
    console.say(_what_follows(shown, stories, total_us))
    predicted = chosen.plan.origin == PREDICTED
    if not predicted and any(story.chosen_us is None for story in shown):
        console.say(_why_estimates(stories))
    console.say(summary_table(shown, total_us, console.width))
    for story in shown:
        if not (predicted or story.tried or story.kept):
            continue
        console.say()
        console.say(bold(f"{title(story.step)}: {' + '.join(story.step.ops)}"))
        console.say(story_text(story, whole=show.whole, predicted=predicted, width=console.width))


def _why_estimates(stories: Sequence[StepStory]) -> str:
    if all(story.chosen_us is None for story in stories):
        return (
            "~ is an estimate: this plan came without times of its steps, and none are stored here"
        )
    return "~ is an estimate: no time of the step came with the plan or is stored here"


def _show_plan(console: Console, chosen: Chosen, packing: Packing | None) -> None:
    from plantune.cli.search_report import families_text
    from plantune.report.packing import packing_text

    plan = chosen.plan
    predicted = f"PREDICTED for {plan.problem.arch}: nothing was measured for this plan"
    standing = Standing.of(plan.route, plan.evidence)
    why = predicted if plan.origin == PREDICTED else None
    console.say(bold(standing.headline(why)))
    for text in (*standing.details(), f"{chosen.label}: {chosen.workload}"):
        console.say(text)
    console.say(families_text(plan))
    if packing is not None:
        console.say(packing_text(packing))


def _what_follows(shown: Sequence[StepStory], stories: Sequence[StepStory], total_us: float) -> str:
    if len(shown) == len(stories):
        return "All steps, the longest first (--whole: every candidate):"
    part = sum(story.about_us for story in shown) / total_us if total_us else 0.0
    return (
        f"{counted(len(shown), 'step')} of {len(stories)}, {percent(part)} of the time of all "
        "(--all: the rest, --step TEXT: some, --whole: every candidate):"
    )
