"""All candidates of a search by step and family, and which of them are worth a look now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from plantune.kernels.family import Candidate
from plantune.measure.outcome import Measured, Outcome
from plantune.search.groups import Group, Proposer
from plantune.search.options import FRAMEWORK, VIEW, Costs, Try

# Configs that were the best for kindred steps are tried at a step before new ones.
LEADERS = 2
# A family that is wrong or crashes so often before anything of it works is left alone.
GRAVE_STAGES = ("numerics", "crash", "timeout", "memory")
MOST_FAULTS = 6

Kin = tuple[str, ...]
# The nodes that a step covers, and which configs are compared there.
Place = tuple[tuple[str, ...], Kin]


class Fields:
    """Keeps the best known candidate of each place, and asks the groups for what comes next."""

    def __init__(self, tries: Iterable[Try], costs: Costs, proposer: Proposer | None) -> None:
        self._costs = costs
        self._places: dict[Place, dict[Candidate, Try]] = {}
        self._faults: Counter[str] = Counter()
        self._best: dict[tuple[str, Kin], tuple[float, Candidate]] = {}
        guesses: dict[Kin, dict[Candidate, float]] = {}
        self._least: dict[tuple[str, Kin], float] = {}
        for tried in tries:
            self._places.setdefault(_place(tried), {})[tried.candidate] = tried
            guess = guesses.setdefault(tried.kin, {}).get(tried.candidate, tried.guess_us)
            guesses[tried.kin][tried.candidate] = min(guess, tried.guess_us)
            field = (tried.step.signature, tried.kin)
            self._least[field] = min(self._least.get(field, tried.guess_us), tried.guess_us)
        self._groups = {
            kin: Group(sorted(found, key=found.__getitem__), proposer)
            for kin, found in guesses.items()
        }

    def learn(self, tried: Try, outcome: Outcome) -> None:
        field, group = (tried.step.signature, tried.kin), self._groups[tried.kin]
        family = tried.candidate.family
        if not isinstance(outcome, Measured):
            grave = outcome.stage in GRAVE_STAGES
            self._faults[family] += grave
            group.learn(tried.candidate, None, grave=grave)
            return
        self._faults[family] -= MOST_FAULTS
        group.learn(tried.candidate, outcome.median_us / self._least[field])
        if field not in self._best or outcome.median_us < self._best[field][0]:
            self._best[field] = (outcome.median_us, tried.candidate)

    def offered(self) -> Iterator[Try]:
        """For each place the best that is known and what to try next."""
        for place, tries in self._places.items():
            yield from self._known(place, tries)
            yield from self._next(place[1], tries, 1)

    def known(self) -> Iterator[Try]:
        """For each place the best that is known; the framework's ops and views in any case."""
        for place, tries in self._places.items():
            found = [*self._known(place, tries)]
            sure = place[1][1] in (FRAMEWORK, VIEW)
            yield from found or (tries.values() if sure else ())

    def ahead(self, used: Sequence[Try], depth: int) -> Iterator[Try]:
        """What will probably be asked for next, when these make up the best cover."""
        rows = [self._next(tried.kin, self._places[_place(tried)], depth) for tried in used]
        for column in range(depth):
            yield from (row[column] for row in rows if column < len(row))
        yield from (tried for tried in self.offered() if not self._costs.knows(tried))

    def _known(self, place: Place, tries: Mapping[Candidate, Try]) -> Iterator[Try]:
        signature = next(iter(tries.values())).step.signature
        best = self._best.get((signature, place[1]))
        if best is not None:
            yield tries[best[1]]

    def _next(self, kin: Kin, tries: Mapping[Candidate, Try], wanted: int) -> list[Try]:
        group = self._groups[kin]
        if self._faults[kin[1]] >= MOST_FAULTS:
            return []
        found = [tries[c] for c in group.leaders(LEADERS) if c in tries]
        found = [tried for tried in found if not self._costs.knows(tried)]
        return [*found, *(tries[c] for c in group.upcoming(tries, wanted))]


def _place(tried: Try) -> Place:
    return tuple(node.name for node in tried.step.nodes), tried.kin
