"""The rows of the study that searches share, as they are read; `board.py` says what they mean."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from plantune.base.canonical import canonical
from plantune.base.jsonable import from_json
from plantune.base.outcome import Outcome
from plantune.kernels.family import Candidate
from plantune.plans.planner.candidates import Key, StepCandidate
from plantune.search.results import Patience

SEARCH, TRIAL, RANK = "search", "trial", "rank"
# One attribute, as each is two statements under the study's lock.
ROW = "row"
ROLE, BY, ITEMS, OUTCOME, REPORTED = "role", "by", "items", "outcome", "told"
HOST, PID, ENVIRONMENT, PHASE, PLAN = "host", "pid", "environment", "phase", "plan"
PREFIX = "plantune search"


@dataclass(frozen=True)
class Row:
    """A trial of the study as plantune wrote it."""

    id: int
    number: int
    state: TrialState
    role: str
    by: int
    attributes: Mapping[str, Any]

    @property
    def is_open(self) -> bool:
        return not self.state.is_finished()

    @property
    def texts(self) -> list[str]:
        """The candidates that were claimed together, each with its step."""
        return list(self.attributes.get(ITEMS, ()))

    def outcome_at(self, place: int) -> Outcome | None:
        """What became of one of them; None before that, and if it was not measured."""
        data = self.attributes.get(f"{OUTCOME} {place}")
        found: Outcome | None = None if data is None else from_json(Outcome, data)
        return found

    @property
    def reported(self) -> list[tuple[Key, Outcome]]:
        """The outcomes that there are, also of a search that died later."""
        found = [(text, self.outcome_at(place)) for place, text in enumerate(self.texts)]
        return [(key_of(text), outcome) for text, outcome in found if outcome is not None]

    @property
    def taken(self) -> list[str]:
        """Candidates that others can skip: those with outcomes, and those being measured."""
        return [
            text
            for place, text in enumerate(self.texts)
            if self.is_open or f"{OUTCOME} {place}" in self.attributes
        ]

    @property
    def plan(self) -> str | None:
        parts = [self.attributes.get(f"{PLAN} {part}", "") for part in range(len(self.attributes))]
        return "".join(parts) if self.state == TrialState.COMPLETE else None


def rows_of(trials: Iterable[FrozenTrial]) -> Iterator[Row]:
    """The rows of a study, in the order of their numbers; others write no trials that plantune
    reads.
    """
    for trial in trials:
        made = trial.user_attrs.get(ROW)
        if isinstance(made, dict) and isinstance(made.get(BY), int):
            role, by = str(made.get(ROLE)), made[BY]
            attributes = {**made, **trial.user_attrs}
            yield Row(trial._trial_id, trial.number, trial.state, role, by, attributes)


@dataclass(frozen=True)
class SharedSearch:
    """What searches share: a storage, and the name of what they search for."""

    storage: optuna.storages.BaseStorage
    name: str
    patience: Patience = field(default_factory=Patience)

    def studies(self) -> list[str]:
        """The names of the searches for this that there were, the latest last."""
        start = f"{PREFIX} {self.name} #"
        names = optuna.get_all_study_names(self.storage)
        numbers = [name.removeprefix(start) for name in names if name.startswith(start)]
        return [f"{start}{n}" for n in sorted(int(n) for n in numbers if n.isdecimal())]

    def next_name(self, known: int) -> str:
        return f"{PREFIX} {self.name} #{known + 1}"


def text_of(candidate: StepCandidate) -> str:
    """A candidate and its step, as rows have them."""
    step, config = candidate.key
    return canonical([step, config.to_json()])


def key_of(text: str) -> Key:
    step, config = json.loads(text)
    return step, Candidate.from_json(config)
