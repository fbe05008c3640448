"""A step's story in words: what was chosen, what else was tried, and why that lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from plantune.base.outcome import Measured, Outcome, Rejected
from plantune.graph.step import Step
from plantune.kernels.family import Candidate
from plantune.report import covers
from plantune.report.reasons import counts_text, rejected_text
from plantune.report.steps import StepStory
from plantune.report.tables import and_more, config_text, counted, percent, table, us_text

# Wider fusions with a line of their own; the others are counted.
WIDER_SHOWN = 3
INDENT = "  "
SUMMARY = ["step", "ops", "time", "part", "candidate", "tried", "runner-up"]
TRIED = ["tried instead", "number", "best", "why not"]
Row = list[str]


def title(step: Step) -> str:
    """The first op, and how many follow it."""
    return and_more([node.name for node in step.nodes])


def summary_table(stories: Sequence[StepStory], total_us: float, width: int | None) -> str:
    """A line for each step: its time, its part of `total_us`, and by how much it won."""
    rows = [
        [
            title(story.step),
            " + ".join(story.step.ops),
            ("~" if story.chosen_us is None else "") + us_text(story.about_us),
            percent(story.about_us / total_us) if total_us else "-",
            config_text(story.chosen),
            str(story.tried),
            "-" if story.margin is None else f"{100 * story.margin:+.1f} %",
        ]
        for story in stories
    ]
    return table(SUMMARY, rows, "llrrlrr", width)


def story_text(story: StepStory, *, whole: bool, predicted: bool, width: int | None) -> str:
    """What was chosen and why the others lost; with `whole` every candidate on its own line."""
    lines = [f"chosen {verdict(story, predicted=predicted)}"]
    room = None if width is None else width - len(INDENT)
    rows = [*_family_rows(story), *_parts_row(story), *_wider_rows(story)]
    if rows:
        lines.append(table(TRIED, rows, "lrrl", room))
    if whole:
        lines += _whole(story.trials, story.chosen, room)
        for cover in story.covers:
            lines += [f"{title(cover.step)}: {' + '.join(cover.step.ops)}"]
            lines += _whole(cover.trials, None, room)
    return "\n".join(f"{INDENT}{line}" for text in lines for line in text.splitlines())


def verdict(story: StepStory, *, predicted: bool = False) -> str:
    name = config_text(story.chosen)
    if predicted:
        return f"{name} by a guess of {us_text(story.guess_us)}"
    if story.chosen_us is None:
        return f"{name}; no time of it came with the plan or is stored here"
    limit = _limit(story.roofline_us, story.chosen_us)
    if story.margin is None:
        return f"{name}, {us_text(story.chosen_us)}; nothing else was measured; {limit}"
    if story.margin >= 0:
        lead = f"the runner-up is {percent(story.margin)} slower"
    else:
        lead = f"another is {percent(-story.margin)} faster alone, but not in the whole network"
    return f"{name}, {us_text(story.chosen_us)}; {lead}; {limit}"


def _limit(roofline_us: float | None, us: float) -> str:
    if roofline_us is None:
        return "its roofline is that of another machine"
    if us < roofline_us:  # as Winograd tiles may be, which need fewer products
        return f"faster than its ops as defined could be ({us_text(roofline_us)})"
    return f"{percent(roofline_us / us)} of the roofline, {us_text(roofline_us)}"


def _family_rows(story: StepStory) -> Iterator[Row]:
    """Other candidates for the same step, by their family, the fastest first."""
    families: dict[str, dict[Candidate, Outcome]] = {}
    ordered = [c for c, _ in (*covers.measured_of(story.trials), *covers.rejected_of(story.trials))]
    for candidate in ordered:
        if candidate != story.chosen:
            families.setdefault(candidate.family, {})[candidate] = story.trials[candidate]
    for family, trials in families.items():
        best = next(iter(covers.measured_of(trials)), None)
        name = f"{family}, other configs" if family == story.chosen.family else family
        reasons = [] if best is None else [_beside(best[1].median_us, story.chosen_us)]
        yield _row(name, trials, best, *reasons)


def _parts_row(story: StepStory) -> Iterator[Row]:
    """Its ops in smaller steps."""
    parts = [cover for cover in story.covers if cover.relation == covers.PART]
    if not parts:
        return
    tried = {(cover.step.signature, c) for cover in parts for c in cover.trials}
    cheapest = covers.cheapest_parts(story.step, parts)
    us = sum(map(covers.best_us, cheapest)) if cheapest else None
    named = " + ".join(f"{'+'.join(c.step.ops)} {us_text(covers.best_us(c))}" for c in cheapest)
    compared = _beside(us, story.chosen_us) if us is not None else "not all parts were measured"
    text = "; ".join(filter(None, (compared, named)))
    yield ["its ops in parts", str(len(tried)), us_text(us), text]


def _wider_rows(story: StepStory) -> Iterator[Row]:
    """Fusions with the neighbours: the best ones, and how many others there are."""
    wider = [c for c in story.covers if c.relation in (covers.WIDER, covers.ACROSS)]
    known = [c for c in wider if c.best is not None]
    known.sort(key=lambda c: covers.best_us(c) - (c.instead_us or 0.0))
    shown, rest = known[:WIDER_SHOWN], [c for c in wider if c not in known[:WIDER_SHOWN]]
    for cover in shown:
        name = f"fused: {title(cover.step)} ({' + '.join(cover.step.ops)})"
        yield _row(name, cover.trials, cover.best, _instead(cover))
    if rest:
        trials = [o for cover in rest for o in cover.trials.values()]
        failed = [o for o in trials if isinstance(o, Rejected)]
        best = min((covers.best_us(c) for c in rest if c.best is not None), default=None)
        text = f"{counted(len(rest), 'other fusion')} with its neighbours"
        yield [text, str(len(trials)), us_text(best), counts_text(failed)]


def _row(
    name: str, trials: covers.Trials, best: tuple[Candidate, Measured] | None, *reasons: str
) -> Row:
    rejected = counts_text(outcome for _, outcome in covers.rejected_of(trials))
    us = None if best is None else best[1].median_us
    return [name, str(len(trials)), us_text(us), "; ".join(filter(None, (*reasons, rejected)))]


def _beside(us: float, chosen_us: float | None) -> str:
    if chosen_us is None:
        return ""
    if us < chosen_us:
        return f"{percent(1 - us / chosen_us)} faster alone, not in the whole network"
    return f"{percent(us / chosen_us - 1)} slower"


def _instead(cover: covers.OtherCover) -> str:
    if cover.relation == covers.ACROSS:
        return f"would split one of {counted(cover.replaces, 'step')} of the plan"
    if cover.instead_us is None:
        return (
            f"no times are stored for the {counted(cover.replaces, 'step')} that it would replace"
        )
    return f"instead of {counted(cover.replaces, 'step')} in {us_text(cover.instead_us)}"


def _whole(trials: covers.Trials, chosen: Candidate | None, width: int | None) -> list[str]:
    """Every candidate with its spread and its error, then those that were rejected."""
    rows = [
        [
            "*" if candidate == chosen else "",
            config_text(candidate),
            us_text(outcome.median_us),
            f"{us_text(outcome.low_us)} to {us_text(outcome.high_us)}",
            f"{outcome.error:.1e} of {outcome.bound:.1e}",
        ]
        for candidate, outcome in covers.measured_of(trials)
    ]
    titles = ["", "candidate", "median", "quartiles", "error"]
    lines = [table(titles, rows, "llrrr", width)] if rows else []
    for candidate, outcome in covers.rejected_of(trials):
        name = config_text(candidate)
        lines.append(f"rejected: {name}: {rejected_text(outcome)}")
    return lines
