"""`plantune explain`: why a plan is as it is, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from plantune.cli.console import Console, bold
from plantune.cli.lookup import Chosen, chosen_plan, database
from plantune.cli.options import Key, common_options, example, key_options
from plantune.report.tables import config_text, percent, table, us_text
from plantune.rivals import Rivals, loss_text, ratio_text, runner_text

if TYPE_CHECKING:
    from plantune.plan import Plan
    from plantune.report.steps import StepStory

ID = click.IntRange(min=1)
REASON_LENGTH = 160


@click.command(
    "explain", epilog=example("plantune explain --batch 8 --step layers.0", "plantune explain 3")
)
@common_options()
@key_options
@click.argument("id", type=ID, required=False)
@click.option("--step", "wanted", metavar="TEXT", help="Only steps with this in a node's name.")
def explain_command(
    console: Console, place: Path | None, key: Key, id: int | None, wanted: str | None
) -> None:
    """Shows why a plan is as it is, step by step.

    For each step there are the candidates tried, those rejected and why, and the chosen one.
    The plan is the one for the options, or the one with this ID. The margin is how much slower the
    runner-up is; the roofline is what arithmetic and traffic take at this machine's best.
    """
    chosen = chosen_plan(place, key, id)
    stories = [s for s in _stories(place, chosen) if _is_wanted(s, wanted)]
    if not stories:
        raise click.BadParameter(f"no step has {wanted!r} in its name", param_hint="'--step'")
    _show(console, chosen, stories)
    console.emit(
        {
            "plan_id": chosen.id,
            "match": chosen.match,
            "origin": chosen.plan.origin,
            "runner": chosen.plan.runner,
            "branches": chosen.plan.branches,
            "evidence": dict(chosen.plan.evidence),
            **Rivals.of(chosen.plan.evidence).to_json(),
            "steps": [story.to_json() for story in stories],
        }
    )


def _stories(place: Path | None, chosen: Chosen) -> list[StepStory]:
    from plantune.report.steps import StepStory, plan_steps, step_roofline_us

    with database(place) as opened:
        return [
            StepStory(
                step,
                candidate,
                opened.trials(step.signature, chosen.environment),
                step_roofline_us(step, chosen.plan.arch),
            )
            for step, candidate in plan_steps(chosen.plan, chosen.problem.graph)
        ]


def _is_wanted(story: StepStory, text: str | None) -> bool:
    return text is None or any(text in node.name for node in story.step.nodes)


def _show(console: Console, chosen: Chosen, stories: list[StepStory]) -> None:
    console.say(bold(f"{chosen.label}: {chosen.problem.network}, batch {chosen.problem.batch}"))
    if (ratio := ratio_text(chosen.plan.evidence)) is not None:
        console.say(ratio)
    for text in (runner_text(chosen.plan.runner), loss_text(chosen.plan.evidence)):
        if text is not None:
            console.say(text)
    if chosen.plan.origin == "predicted":
        console.say(f"PREDICTED for {chosen.plan.arch}: nothing was measured for this plan")
    for story in stories:
        console.say()
        console.say(bold(f"{story.step.name}: {' + '.join(story.step.ops)}"))
        console.say(f"  {_verdict(story, chosen.plan)}")
        if story.measured:
            console.say(_indented(_measured_table(story)))
        for candidate, outcome in story.rejected:
            reason = " ".join(outcome.reason.split())[:REASON_LENGTH]
            name = config_text(candidate.family, candidate.config)
            console.say(f"  rejected: {name}: {outcome.stage}: {reason}")


def _verdict(story: StepStory, plan: Plan) -> str:
    name = config_text(story.chosen.family, story.chosen.config)
    if plan.origin == "predicted":
        from plantune.kernels.registry import estimate_us
        from plantune.space.arch import load_arch

        guess_us = estimate_us(story.step, story.chosen, load_arch(plan.arch))
        return f"chosen {name} by a guess of {us_text(guess_us)}"
    if story.chosen_us is None:
        return f"chosen {name}; no time of it is stored here"
    limit = _limit(story.roofline_us, story.chosen_us)
    if story.margin is None:
        return f"chosen {name}, {us_text(story.chosen_us)}; nothing else was measured; {limit}"
    if story.margin >= 0:
        lead = f"the runner-up is {percent(story.margin)} slower"
    else:
        lead = f"another is {percent(-story.margin)} faster alone, but not in the whole network"
    return f"chosen {name}, {us_text(story.chosen_us)}; {lead}; {limit}"


def _limit(roofline_us: float | None, us: float) -> str:
    if roofline_us is None:
        return "its roofline is that of another machine"
    if us < roofline_us:  # as Winograd tiles may be, which need fewer products
        return f"faster than its ops as defined could be ({us_text(roofline_us)})"
    return f"{percent(roofline_us / us)} of the roofline, {us_text(roofline_us)}"


def _measured_table(story: StepStory) -> str:
    rows = [
        [
            "*" if candidate == story.chosen else "",
            config_text(candidate.family, candidate.config),
            us_text(outcome.median_us),
            f"{us_text(outcome.low_us)} to {us_text(outcome.high_us)}",
            f"{outcome.error:.1e} of {outcome.bound:.1e}",
        ]
        for candidate, outcome in story.measured
    ]
    return table(["", "candidate", "median", "quartiles", "error"], rows, "llrrr")


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
