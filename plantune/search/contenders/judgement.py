"""Decides who runs a network after its race: the plan's program only if it is clearly faster."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from plantune.base.canonical import Attrs
from plantune.graph import Graph
from plantune.measure.machine_state import State
from plantune.measure.racing.built_routes import PLANTUNE
from plantune.measure.racing.race import OURS, Race
from plantune.measure.timing import Timing, in_common, joined, ratio_interval
from plantune.plans import raced_routes
from plantune.plans.guess import framework_plan
from plantune.plans.plan import EAGER, FROZEN_ROUTES, LIVE_ROUTES, PROGRAM, Plan
from plantune.plans.standing import CAPTURED, EAGER_RATIO, UNBEATEN, UNBEATEN_RATIO, ratio_evidence
from plantune.plans.verdict import FASTER, SLOWER, Interval
from plantune.plans.written_words import BEST_ROUTE, BEST_ROUTE_MS, MEASURED, RACED_ROUTES
from plantune.search import policy
from plantune.search.results import StepsSum
from plantune.space import SearchSpace


@dataclass(frozen=True)
class TimedPair:
    """The timings of the plan and of another route in the same rounds."""

    ours: Timing
    theirs: Timing

    @property
    def ratio(self) -> Interval:
        return ratio_interval(self.ours, self.theirs)

    @property
    def is_won(self) -> bool:
        """A tie is not a win: the other route is what runs without plantune."""
        return self.ratio.verdict == FASTER

    @property
    def is_open(self) -> bool:
        return self.ratio.verdict not in (FASTER, SLOWER)

    def and_again(self, other: TimedPair) -> TimedPair:
        """With the rounds of a repeated race."""
        return TimedPair(joined(self.ours, other.ours), joined(self.theirs, other.theirs))


TimedPairs = Mapping[str, TimedPair]


def pairs_of(race: Race) -> TimedPairs:
    """The plan against each of the framework's routes."""
    ours = race.timings[PLANTUNE]
    theirs = {name: timing for name, timing in race.timings.items() if name not in OURS}
    return {name: TimedPair(*in_common(ours, timing)) for name, timing in theirs.items()}


def repeated(pairs: TimedPairs, race: Race) -> TimedPairs:
    """These with the rounds of a race that some routes ran once more."""
    again = pairs_of(race)
    return {
        name: pair.and_again(again[name]) if name in again else pair for name, pair in pairs.items()
    }


def undecided(pairs: TimedPairs) -> tuple[str, ...]:
    """Routes with the plan's promise that may be faster or slower than it, the best first. None if
    one of them is clearly faster: then the plan has lost.
    """
    same = [name for name in _ranked(pairs) if name in (*LIVE_ROUTES, CAPTURED)]
    if any(pairs[name].ratio.verdict == SLOWER for name in same):
        return ()
    return tuple(name for name in same if pairs[name].is_open)


def winner(pairs: TimedPairs, known: Iterable[str]) -> str:
    """The program if it is clearly faster than all of these routes, else the best of them; eager if
    neither is clearly faster than that. A race of one round on busy cores made eager-channels-last
    the route of a network for which it took 1.5 of eager's time (2 cores, 2026-11-28).
    """
    ranked = [name for name in _ranked(pairs) if name in set(known)]
    if all(pairs[name].is_won for name in ranked):
        return PROGRAM
    best, plain = ranked[0], pairs.get(EAGER)
    if plain is None or plain.is_won:
        return best
    return best if TimedPair(*in_common(pairs[best].theirs, plain.theirs)).is_won else EAGER


def judged(plan: Plan, pairs: TimedPairs, plain: Plan | None = None) -> Plan:
    """The plan with who runs it, live and frozen. `plain`, the framework's kernels as one graph,
    replaces it if it was as good.
    """
    runs = live = winner(pairs, (*LIVE_ROUTES, CAPTURED))
    if live == CAPTURED and plain is None:
        runs = live = PROGRAM
        pairs = {n: pair for n, pair in pairs.items() if n != CAPTURED}
    elif live == CAPTURED and plain is not None:
        plan, live = replace(plain, evidence=_of_captured(pairs)), PROGRAM
    frozen = winner(pairs, FROZEN_ROUTES)
    differs = frozen not in (PROGRAM, live)
    plan = replace(plan, route=live, frozen_route=frozen if differs else None)
    found = {**_loss(runs, pairs), **_standing(runs, pairs)}
    return replace(plan, evidence=Attrs({**plan.evidence, **found}))


def evidence_of(race: Race) -> Attrs:
    """What a plan keeps of its program's race."""
    ours = race.timings[PLANTUNE]
    evidence: dict[str, float | str] = {
        RACED_ROUTES: ",".join(name for name in race.timings if name not in OURS),
        "median_ms": ours.median_us / 1e3,
        "low_ms": ours.low_us / 1e3,
        "high_ms": ours.high_us / 1e3,
    }
    if race.best_route is not None and race.ratio is not None:
        theirs = race.timings[race.best_route]
        evidence |= {
            BEST_ROUTE: race.best_route,
            BEST_ROUTE_MS: theirs.median_us / 1e3,
            "ratio": race.ratio.ratio,
            "ratio_low": race.ratio.low,
            "ratio_high": race.ratio.high,
        }
    return Attrs(evidence)


def plain_graph(graph: Graph, space: SearchSpace, *, network: str) -> Plan | None:
    """The framework's own kernels as one captured graph, measured in a race; None on a CPU."""
    if space.arch.kind != "cuda":
        return None
    return replace(framework_plan(graph, space, network=network), origin=MEASURED)


def judged_alone(plan: Plan, race: Race, plain: Plan | None = None) -> Plan:
    """The plan as judged by one race."""
    return judged(replace(plan, evidence=evidence_of(race)), pairs_of(race), plain)


def _of_captured(pairs: TimedPairs) -> Attrs:
    """What a plan of the framework's kernels as one graph keeps of the race that it won."""
    ours = pairs[CAPTURED].theirs
    others = {
        n: TimedPair(*in_common(ours, pair.theirs)) for n, pair in pairs.items() if n != CAPTURED
    }
    best = next(iter(_ranked(others)), None)
    timings = {PLANTUNE: ours, **{name: pair.theirs for name, pair in others.items()}}
    return evidence_of(Race(timings, {}, best, None if best is None else others[best].ratio))


def _standing(runs: str, pairs: TimedPairs) -> dict[str, float | str]:
    """How what runs compares with eager, and of a plan that does not run a route that it had to
    beat: what runs in its place, if that is one.
    """
    found: dict[str, float | str] = {}
    if runs != EAGER and EAGER in pairs:
        found |= ratio_evidence(EAGER_RATIO, _beside(runs, EAGER, pairs))
    if runs != PROGRAM:
        had = [n for n in _ranked(pairs) if n in (*LIVE_ROUTES, CAPTURED) and not pairs[n].is_won]
        name = runs if runs in had or not had else had[0]
        found |= {UNBEATEN: name, **ratio_evidence(UNBEATEN_RATIO, pairs[name].ratio)}
    return found


def _beside(runs: str, other: str, pairs: TimedPairs) -> Interval:
    """What runs by another route, in the rounds that both ran."""
    ours = pairs[other].ours if runs == PROGRAM else pairs[runs].theirs
    return ratio_interval(*in_common(ours, pairs[other].theirs))


def _loss(route: str, pairs: TimedPairs) -> dict[str, float | str]:
    """By how much torch.compile is faster than what runs now, if it is."""
    found: dict[str, float | str] = {}
    for name in _ranked(pairs):
        if not name.startswith(raced_routes.COMPILED):
            continue
        ratio = _beside(route, name, pairs)
        if ratio.verdict == SLOWER:
            found = {raced_routes.LOST_TO: name, raced_routes.LOSS: ratio.ratio}
        break
    return found


def _ranked(pairs: TimedPairs) -> list[str]:
    """The routes, the fastest first, each against the plan in the same rounds."""
    return sorted(pairs, key=lambda name: -pairs[name].ratio.ratio)


def with_all_rounds(race: Race, pairs: TimedPairs) -> Race:
    """The race with the ratio to the best of its routes over all rounds that both ran."""
    best = race.best_route
    return race if best is None or race.ratio is None else replace(race, ratio=pairs[best].ratio)


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
        if not 1 / policy.USUAL_FACTOR <= factor <= policy.USUAL_FACTOR:
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
