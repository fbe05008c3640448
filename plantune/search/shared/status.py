"""What goes on in a storage that searches share, for whoever asks; changes nothing there."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import optuna

from plantune.base.outcome import Measured
from plantune.search.results import Patience
from plantune.search.shared.board_rows import (
    ENVIRONMENT,
    HOST,
    PHASE,
    PID,
    PREFIX,
    RANK,
    REPORTED,
    SEARCH,
    TRIAL,
    Row,
    rows_of,
)
from plantune.search.shared.rdb import Persistent, close_shared, opened_shared


@dataclass(frozen=True)
class Member:
    """One search: `state` is its stage, silent, or ended. Its last heartbeat `reported` this."""

    host: str
    pid: int
    state: str
    measured: int
    reported: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """`reported` is written as `told`."""
        data = asdict(self)
        reported = data.pop("reported")
        return {**data, REPORTED: reported}


@dataclass(frozen=True)
class Status:
    """One shared search. `median_ms` is of the plan that was found, None before there is one."""

    name: str
    device: str
    members: tuple[Member, ...]
    measured: int
    rejected: int
    running: int
    median_ms: float | None

    @property
    def state(self) -> str:
        if self.median_ms is not None:
            return "done"
        alive = any(member.state not in ("silent", "ended") for member in self.members)
        return "goes on" if alive else "ended without a plan"

    def to_json(self) -> dict[str, Any]:
        members = [member.to_json() for member in self.members]
        return {**asdict(self), "members": members, "state": self.state}


def statuses(url: str, does: Persistent, patience: Patience) -> list[Status]:
    """Every shared search at a URL, the latest of each problem last. Raises StorageLost."""

    def read() -> list[Status]:
        storage = opened_shared(url, patience)
        try:
            names = optuna.get_all_study_names(storage)
            return [_status(storage, name) for name in names if name.startswith(PREFIX)]
        finally:
            close_shared(storage)

    return does(read)


def _status(storage: optuna.storages.BaseStorage, name: str) -> Status:
    id = storage.get_study_id_from_name(name)
    trials = storage.get_all_trials(id, deepcopy=False)
    rows = list(rows_of(trials))
    silent = set(storage._get_stale_trial_ids(id))  # type: ignore[attr-defined]
    searches = [row for row in rows if row.role == SEARCH]
    of_trials = [row for row in rows if row.role == TRIAL]
    outcomes = [(row.by, outcome) for row in of_trials for _, outcome in row.reported]
    of_search = Counter(by for by, _ in outcomes)
    measured = sum(isinstance(outcome, Measured) for _, outcome in outcomes)
    values = {trial._trial_id: trial.value for trial in trials}
    found = [values[r.id] for r in rows if r.role == RANK and r.plan is not None]
    first = searches[0].attributes[ENVIRONMENT] if searches else {}
    return Status(
        name=name,
        device=str(first.get("device", "?")),
        members=tuple(_member(row, silent, of_search[row.number]) for row in searches),
        measured=measured,
        rejected=len(outcomes) - measured,
        running=sum(len(row.texts) - len(row.reported) for row in of_trials if row.is_open),
        median_ms=found[0] if found else None,
    )


def _member(row: Row, silent: set[int], measured: int) -> Member:
    reported = dict(row.attributes.get(REPORTED) or {})
    state = str(reported.get("phase") or row.attributes.get(PHASE, "?"))
    if not row.is_open:
        state = "ended"
    elif row.id in silent:
        state = "silent"
    return Member(str(row.attributes[HOST]), int(row.attributes[PID]), state, measured, reported)
