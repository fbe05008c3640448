"""Decides who runs a network after its race: the plan's program only if it is clearly faster."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from plantune.base.canonical import Attrs
from plantune.graph import Graph
from plantune.measure.machine_state import State
from plantune.measure.racing.entrants import PLANTUNE
from plantune.measure.racing.race import OURS, Race
from plantune.measure.timing import Timing, in_common, joined, ratio_interval
from plantune.plans import rivals
from plantune.plans.guess import default_plan
from plantune.plans.plan import EAGER, FROZEN_RUNNERS, LIVE_RUNNERS, PROGRAM, Plan
from plantune.plans.standing import CAPTURED, EAGER_RATIO, UNBEATEN, UNBEATEN_RATIO, ratio_evidence
from plantune.plans.verdict import FASTER, SLOWER, Interval
from plantune.plans.written_words import MEASURED
from plantune.search.results import StepsSum
from plantune.space import SearchSpace

# The usual factor, either way, between a whole pass and the sum of its steps.
USUAL_FACTOR = 1.5


@dataclass(frozen=True)
class Duel:
    """The plan and one rival, timed in the same rounds."""

    ours: Timing
    theirs: Timing

    @property
    def ratio(self) -> Interval:
        return ratio_interval(self.ours, self.theirs)

    @property
    def is_won(self) -> bool:
        """A tie is not a win: the rival is what runs without plantune."""
        return self.ratio.verdict == FASTER

    @property
    def is_open(self) -> bool:
        return self.ratio.verdict not in (FASTER, SLOWER)

    def and_again(self, other: Duel) -> Duel:
        """The duel with the rounds of a repeated race."""
        return Duel(joined(self.ours, other.ours), joined(self.theirs, other.theirs))


Duels = Mapping[str, Duel]


def duels_of(race: Race) -> Duels:
    """The plan against each of its rivals."""
    ours = race.timings[PLANTUNE]
    theirs = {name: timing for name, timing in race.timings.items() if name not in OURS}
    return {name: Duel(*in_common(ours, timing)) for name, timing in theirs.items()}


def repeated(duels: Duels, race: Race) -> Duels:
    """The duels with the rounds of a race that some of the rivals ran once more."""
    again = duels_of(race)
    return {name: d.and_again(again[name]) if name in again else d for name, d in duels.items()}


def undecided(duels: Duels) -> tuple[str, ...]:
    """Rivals with the plan's promise that may be faster or slower than it, the best first. None if
    one of them is clearly faster: then the plan has lost.
    """
    same = [name for name in _ranked(duels) if name in (*LIVE_RUNNERS, CAPTURED)]
    if any(duels[name].ratio.verdict == SLOWER for name in same):
        return ()
    return tuple(name for name in same if duels[name].is_open)


def winner(duels: Duels, known: Iterable[str]) -> str:
    """The program if it is clearly faster than all known rivals, else the best of them; eager if
    neither is clearly faster than that. A race of one round on busy cores made eager-channels-last
    the runner of a network for which it took 1.5 of eager's time (2 cores, 2026-11-28).
    """
    ranked = [name for name in _ranked(duels) if name in set(known)]
    if all(duels[name].is_won for name in ranked):
        return PROGRAM
    best, plain = ranked[0], duels.get(EAGER)
    if plain is None or plain.is_won:
        return best
    return best if Duel(*in_common(duels[best].theirs, plain.theirs)).is_won else EAGER


def judged(plan: Plan, duels: Duels, plain: Plan | None = None) -> Plan:
    """The plan with who runs it, live and frozen. `plain`, the framework's kernels as one graph,
    replaces it if it was as good.
    """
    runs = live = winner(duels, (*LIVE_RUNNERS, CAPTURED))
    if live == CAPTURED and plain is None:
        runs = live = PROGRAM
        duels = {n: d for n, d in duels.items() if n != CAPTURED}
    elif live == CAPTURED and plain is not None:
        plan, live = replace(plain, evidence=_of_captured(duels)), PROGRAM
    frozen = winner(duels, FROZEN_RUNNERS)
    differs = frozen not in (PROGRAM, live)
    plan = replace(plan, runner=live, frozen_runner=frozen if differs else None)
    found = {**_loss(runs, duels), **_standing(runs, duels)}
    return replace(plan, evidence=Attrs({**plan.evidence, **found}))


def evidence_of(race: Race) -> Attrs:
    """What a plan keeps of its program's race."""
    ours = race.timings[PLANTUNE]
    evidence: dict[str, float | str] = {
        rivals.KEY: ",".join(name for name in race.timings if name not in OURS),
        "median_ms": ours.median_us / 1e3,
        "low_ms": ours.low_us / 1e3,
        "high_ms": ours.high_us / 1e3,
    }
    if race.best_baseline is not None and race.ratio is not None:
        theirs = race.timings[race.best_baseline]
        evidence |= {
            "baseline": race.best_baseline,
            "baseline_ms": theirs.median_us / 1e3,
            "ratio": race.ratio.ratio,
            "ratio_low": race.ratio.low,
            "ratio_high": race.ratio.high,
        }
    return Attrs(evidence)


def plain_graph(graph: Graph, space: SearchSpace, *, network: str) -> Plan | None:
    """The framework's own kernels as one captured graph, measured in a race; None on a CPU."""
    if space.arch.kind != "cuda":
        return None
    return replace(default_plan(graph, space, network=network), origin=MEASURED)


def judged_alone(plan: Plan, race: Race, plain: Plan | None = None) -> Plan:
    """The plan as judged by one race."""
    return judged(replace(plan, evidence=evidence_of(race)), duels_of(race), plain)


def _of_captured(duels: Duels) -> Attrs:
    """What a plan of the framework's kernels as one graph keeps of the race that it won."""
    ours = duels[CAPTURED].theirs
    others = {n: Duel(*in_common(ours, d.theirs)) for n, d in duels.items() if n != CAPTURED}
    best = next(iter(_ranked(others)), None)
    timings = {PLANTUNE: ours, **{name: duel.theirs for name, duel in others.items()}}
    return evidence_of(Race(timings, {}, best, None if best is None else others[best].ratio))


def _standing(runs: str, duels: Duels) -> dict[str, float | str]:
    """How what runs compares with eager, and of a plan that does not run a way that it had to beat:
    what runs in its place, if that is one.
    """
    found: dict[str, float | str] = {}
    if runs != EAGER and EAGER in duels:
        found |= ratio_evidence(EAGER_RATIO, _beside(runs, EAGER, duels))
    if runs != PROGRAM:
        had = [n for n in _ranked(duels) if n in (*LIVE_RUNNERS, CAPTURED) and not duels[n].is_won]
        name = runs if runs in had or not had else had[0]
        found |= {UNBEATEN: name, **ratio_evidence(UNBEATEN_RATIO, duels[name].ratio)}
    return found


def _beside(runs: str, other: str, duels: Duels) -> Interval:
    """What runs by another way, in the rounds that both ran."""
    ours = duels[other].ours if runs == PROGRAM else duels[runs].theirs
    return ratio_interval(*in_common(ours, duels[other].theirs))


def _loss(runner: str, duels: Duels) -> dict[str, float | str]:
    """By how much torch.compile is faster than what runs now, if it is."""
    found: dict[str, float | str] = {}
    for name in _ranked(duels):
        if not name.startswith(rivals.COMPILED):
            continue
        ratio = _beside(runner, name, duels)
        if ratio.verdict == SLOWER:
            found = {rivals.LOST_TO: name, rivals.LOSS: ratio.ratio}
        break
    return found


def _ranked(duels: Duels) -> list[str]:
    """The rivals, the fastest first, each against the plan in the same rounds."""
    return sorted(duels, key=lambda name: -duels[name].ratio.ratio)


def with_all_rounds(race: Race, duels: Duels) -> Race:
    """The race with the ratio to its best baseline over all rounds that both ran."""
    best = race.best_baseline
    return race if best is None or race.ratio is None else replace(race, ratio=duels[best].ratio)


def race_notes(race: Race, plan: StepsSum, eager: StepsSum, machine: State) -> list[str]:
    """A line for each of plan and eager whose time in the race differs much from its steps' sum, if
    all of them were measured.
    """
    lines = []
    for name, steps in ((PLANTUNE, plan), ("eager", eager)):
        timing = race.timings.get(name)
        if timing is None or steps.estimated or not 0 < steps.us < math.inf:
            continue
        factor = timing.median_us / steps.us
        if not 1 / USUAL_FACTOR <= factor <= USUAL_FACTOR:
            what = f"{name}: {timing.median_us / 1e3:.3g} ms in the race, its steps alone"
            why = _why_different(factor, timing.noisy, machine)
            lines.append(f"{what} {steps.us / 1e3:.3g} ms: {why}")
    return lines


def _why_different(factor: float, noisy: bool, machine: State) -> str:
    if machine.reason:
        return f"{machine.reason} during the race"
    if noisy:
        return "the race was disturbed, its times vary widely"
    if factor < 1:
        return "the machine was slower, or disturbed, while the steps were measured"
    return "launches, conversions and cold caches between the steps"
