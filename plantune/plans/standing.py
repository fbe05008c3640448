"""What runs a network, and how fast beside the framework's routes, as its plan's race showed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plantune.plans.raced_routes import LOSS, LOST_TO, RacedRoutes
from plantune.plans.verdict import SLOWER, TIE, UNDECIDED, Interval, compared, part_text
from plantune.plans.written_words import BEST_ROUTE

PROGRAM, EAGER, CAPTURED = "program", "eager", "cuda-graph"
# What they are called in a sentence; the framework's other routes have their own names.
NAMES = {PROGRAM: "plantune's plan", CAPTURED: "the framework's kernels in one CUDA graph"}
NOT_RACED, NO_RACE = "it was not raced", "no plan was raced"
# Keys of a plan's evidence: the name of a route that the plan had to beat and did not, and ratios,
# each with its range: the plan by the fastest route, what runs by eager, the plan by the unbeaten.
UNBEATEN = "unbeaten"
RATIO, EAGER_RATIO, UNBEATEN_RATIO = "ratio", "eager_ratio", "unbeaten_ratio"
# Why a plan does not run, by how it compares with a route that it had to beat.
WHY_NOT = {
    TIE: "no plan was clearly faster",
    SLOWER: "every plan was slower",
    UNDECIDED: "times varied too much to show that a plan is faster",
}
BEATEN_BY_ANOTHER = "no plan was clearly faster than all of the framework's routes"

Beside = tuple[str, Interval]


@dataclass(frozen=True)
class Standing:
    """`route` runs the network. `beside_eager` is its time by eager's. `best` is the fastest of the
    framework's routes in the race, and `unbeaten` one that the plan had to beat and did not; both
    with the plan's time by theirs, or with that of what runs if it ran itself, `as_it_runs`.
    `lost_to` is torch.compile's route that is faster than what runs, and by how much.
    """

    route: str
    beside_eager: Interval | None = None
    best: Beside | None = None
    unbeaten: Beside | None = None
    lost_to: tuple[str, float] | None = None
    caveat: str | None = None
    as_it_runs: bool = False

    @staticmethod
    def of(route: str, evidence: Mapping[str, Any]) -> Standing:
        """Of a plan with this evidence, by whoever runs it."""
        best = _beside(evidence, BEST_ROUTE, RATIO)
        beside_eager = _interval(evidence, EAGER_RATIO)
        if beside_eager is None and route == PROGRAM and best is not None and best[0] == EAGER:
            beside_eager = best[1]  # plans from before that was kept
        return Standing(
            route,
            None if route == EAGER else beside_eager,
            best,
            _beside(evidence, UNBEATEN, UNBEATEN_RATIO),
            _lost_to(evidence),
            None if best is None else RacedRoutes.of(evidence).warning,
        )

    @property
    def is_known(self) -> bool:
        """Whether there was a race."""
        return not (self.beside_eager is None and self.best is None and self.unbeaten is None)

    def headline(self, why: str | None = None) -> str:
        """One sentence; `why` says of what was not raced why it runs."""
        shown = self.shown
        runs = f"runs as {NAMES.get(shown, shown)}"
        if not self.is_known:
            return f"{runs}: {why or (NOT_RACED if shown == PROGRAM else NO_RACE)}"
        runs = ", ".join(filter(None, (runs, self._speed())))
        return f"{runs}: {self._why_not()}" if self._has_lost else runs

    def details(self) -> list[str]:
        """The numbers of the sentence with their ranges, and what was faster still."""
        lines = []
        if self.beside_eager is not None:
            lines.append(part_text(self.beside_eager, "eager's"))
        if self.best is not None and not self._is_told(self.best[0]):
            text = part_text(self.best[1], f"{self.best[0]}'s")
            lines.append(f"the best plan: {text}" if self._has_lost else text)
        lines += [] if self.caveat is None else [self.caveat]
        if self.lost_to is not None and not self._says_loss(self.lost_to[0]):
            lines.append(_lost_text(*self.lost_to))
        return lines

    @property
    def _has_lost(self) -> bool:
        """Whether a plan did not win its race, so that what runs is the framework's."""
        return not self.as_it_runs and (self.route != PROGRAM or self.unbeaten is not None)

    @property
    def shown(self) -> str:
        """What runs: a plan of the framework's kernels as one graph goes by that route's name."""
        is_plain = self.route == PROGRAM and self.unbeaten is not None
        return self.unbeaten[0] if is_plain and self.unbeaten else self.route

    def _speed(self) -> str:
        """How what runs compares with eager, and a plan that won with the fastest other route."""
        beside = [] if self.beside_eager is None else [(EAGER, self.beside_eager)]
        if self.best is not None and not self._has_lost and self.best[0] != EAGER:
            beside.append((f"{self.best[0]} (the fastest other route)", self.best[1]))
        is_same = len({found.verdict for _, found in beside}) == 1
        texts = (compared(found, self._called(name)) for name, found in beside)
        return (" and " if is_same else ", but ").join(texts)

    def _called(self, name: str) -> str:
        return f"{name} called directly" if name == self.route else name

    def _why_not(self) -> str:
        """Why the framework runs the network, and what the best plan reached."""
        beside = self.unbeaten or self.best
        if beside is None:
            return NO_RACE
        name, found = beside
        whose = "its" if name == self.shown else f"{name}'s"
        text = WHY_NOT.get(found.verdict, BEATEN_BY_ANOTHER)
        if self.unbeaten is None and whose != "its":
            text = WHY_NOT[TIE]  # it need not be a route that the plan had to beat
        return f"{text} (best: {part_text(found, whose)})"

    def _is_told(self, name: str) -> bool:
        """Whether the ratio to this route is told elsewhere: in the sentence, or in a line."""
        if self._has_lost:
            return name == (self.unbeaten or self.best or ("",))[0]
        return name == EAGER and self.beside_eager is not None

    def _says_loss(self, name: str) -> bool:
        """Whether the sentence says that this route was faster."""
        return not self._has_lost and self.best is not None and self.best[0] == name


def loss_text(evidence: Mapping[str, Any]) -> str | None:
    """Says that torch.compile was faster than what runs now; None if not, or if it did not race."""
    found = _lost_to(evidence)
    return None if found is None else _lost_text(*found)


def _lost_text(name: str, loss: float) -> str:
    return f"{name} was faster: a call takes {loss:.2f} of its time"


def ratio_evidence(key: str, found: Interval) -> dict[str, float]:
    """An interval as a plan's evidence keeps it."""
    return {key: found.ratio, f"{key}_low": found.low, f"{key}_high": found.high}


def _lost_to(evidence: Mapping[str, Any]) -> tuple[str, float] | None:
    name, loss = evidence.get(LOST_TO), evidence.get(LOSS)
    is_kept = isinstance(name, str) and isinstance(loss, (int, float))
    return (str(name), float(loss)) if is_kept and loss is not None else None


def _beside(evidence: Mapping[str, Any], name: str, key: str) -> Beside | None:
    whose, found = evidence.get(name), _interval(evidence, key)
    return (whose, found) if isinstance(whose, str) and found is not None else None


def _interval(evidence: Mapping[str, Any], key: str) -> Interval | None:
    """Plans from elsewhere may have anything there; of old ones only the ratio is known."""
    ratio, low, high = (evidence.get(f"{key}{end}") for end in ("", "_low", "_high"))
    if not isinstance(ratio, (int, float)) or not ratio > 0:
        return None
    if not (isinstance(low, (int, float)) and isinstance(high, (int, float))):
        return Interval.without_range(float(ratio))
    return Interval(float(ratio), min(low, ratio), max(high, ratio))
