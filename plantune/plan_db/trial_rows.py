"""Trials as rows: a candidate of a step, and what became of it in an environment."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from plantune.canonical import canonical
from plantune.errors import InvalidPlan
from plantune.kernels.family import Candidate
from plantune.outcome import Measured, Outcome, Rejected
from plantune.plan_db.rows import INTEGER, REAL, TRIALS, Row, sealed

_MEASURED = ("median_us", "low_us", "high_us", "samples", "error", "bound", "deterministic")
_PLAIN = {INTEGER: int, REAL: float}


def trial_row(
    step: str, candidate: Candidate, environment: str, outcome: Outcome, created_at: str
) -> Row:
    """`step` is the step's signature, `environment` the key of one."""
    values: dict[str, Any] = dict.fromkeys(TRIALS)
    values.update(step=step, candidate=canonical(candidate.to_json()), environment=environment)
    values.update(asdict(outcome), created_at=created_at)
    values["kind"] = "measured" if isinstance(outcome, Measured) else "rejected"
    return sealed("trials", {name: _stored(name, value) for name, value in values.items()})


def _stored(name: str, value: Any) -> Any:
    """The value as SQLite will give it back: a column has one type."""
    plain = _PLAIN.get(TRIALS[name])
    return value if value is None or plain is None else plain(value)


def parse_trial(row: Row) -> tuple[Candidate, Outcome]:
    """The trial of a row whose checksum was checked; raises InvalidPlan or ValueError."""
    candidate = Candidate.from_json(json.loads(row["candidate"]))
    if row["kind"] == "rejected":
        return candidate, Rejected(row["stage"], row["reason"])
    if row["kind"] != "measured":
        raise InvalidPlan(f"kind: must be measured or rejected, got {row['kind']!r}")
    values = {name: row[name] for name in _MEASURED}
    values["deterministic"] = bool(values["deterministic"])
    return candidate, Measured(**values, cache=row["cache"])
