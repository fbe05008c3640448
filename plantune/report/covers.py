"""Other ways to cover the ops of a plan's step: in parts, or fused with their neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from plantune.base.outcome import Measured, Outcome, Rejected
from plantune.graph.step import Step
from plantune.kernels.family import Candidate

Trials = Mapping[Candidate, Outcome]
# A part of the plan's step; the step with whole neighbours; one that also splits a neighbour.
PART, WIDER, ACROSS = "part", "wider", "across"


@dataclass(frozen=True)
class OtherCover:
    """Another step over some of the same ops, and what was tried for it.

    `replaces` counts the plan's steps that it would touch, `instead_us` is what these take; None if
    that is not known or not comparable.
    """

    step: Step
    trials: Trials
    relation: str
    replaces: int
    instead_us: float | None

    @property
    def best(self) -> tuple[Candidate, Measured] | None:
        found = measured_of(self.trials)
        return found[0] if found else None

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step.name,
            "nodes": [node.name for node in self.step.nodes],
            "ops": list(self.step.ops),
            "relation": self.relation,
            "replaces": self.replaces,
            "instead_us": self.instead_us,
            **trials_json(self.trials),
        }


def measured_of(trials: Trials) -> list[tuple[Candidate, Measured]]:
    """The fastest first."""
    known = [(c, o) for c, o in trials.items() if isinstance(o, Measured)]
    return sorted(known, key=lambda pair: pair[1].median_us)


def rejected_of(trials: Trials) -> list[tuple[Candidate, Rejected]]:
    return [(c, o) for c, o in trials.items() if isinstance(o, Rejected)]


def trials_json(trials: Trials) -> dict[str, Any]:
    measured, rejected = measured_of(trials), rejected_of(trials)
    return {
        "measured": [{**c.to_json(), "median_us": o.median_us, "low_us": o.low_us,
                      "high_us": o.high_us, "error": o.error, "bound": o.bound,
                      "deterministic": o.deterministic} for c, o in measured],
        "rejected": [{**c.to_json(), "stage": o.stage, "reason": o.reason} for c, o in rejected],
    }  # fmt: skip


def names_of(step: Step) -> frozenset[str]:
    return frozenset(node.name for node in step.nodes)


def other_covers(
    step: Step,
    planned: Sequence[tuple[Step, float | None]],
    tried: Iterable[tuple[Step, Trials]],
) -> tuple[OtherCover, ...]:
    """What was tried of the steps that share an op with `step`; `planned` are the plan's steps."""
    own = names_of(step)
    found = []
    for other, trials in tried:
        names = names_of(other)
        if not trials or names == own or not names & own:
            continue
        if names < own:
            found.append(OtherCover(other, trials, PART, 1, None))
            continue
        touched = [(step, us) for step, us in planned if names & names_of(step)]
        whole = all(names_of(step) <= names for step, _ in touched)
        times = [us for _, us in touched if us is not None]
        instead_us = sum(times) if whole and len(times) == len(touched) else None
        relation = WIDER if whole else ACROSS
        found.append(OtherCover(other, trials, relation, len(touched), instead_us))
    return tuple(found)


def cheapest_parts(step: Step, covers: Iterable[OtherCover]) -> tuple[OtherCover, ...]:
    """The measured parts that together cover the step in the least time; () if none do.

    What it costs to change layouts between them is left out.
    """
    parts = [(names_of(c.step), c) for c in covers if c.relation == PART and c.best is not None]

    @cache
    def cheapest(left: frozenset[str]) -> tuple[float, tuple[OtherCover, ...]] | None:
        if not left:
            return 0.0, ()
        first = next(node.name for node in step.nodes if node.name in left)
        offers = []
        for names, cover in parts:
            if first in names and names <= left and (rest := cheapest(left - names)) is not None:
                offers.append((rest[0] + best_us(cover), (cover, *rest[1])))
        return min(offers, key=lambda offer: offer[0], default=None)

    found = cheapest(names_of(step))
    return () if found is None else found[1]


def best_us(cover: OtherCover) -> float:
    assert cover.best is not None
    return cover.best[1].median_us
