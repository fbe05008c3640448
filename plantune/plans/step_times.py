"""The time of a plan's step on the machine that searched it; the plan carries it along."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from plantune.errors import InvalidPlan
from plantune.kernels.family import Candidate

FIELDS = {"us", "roofline_us", "runner_up"}
DIGITS = 5


@dataclass(frozen=True)
class StepTimes:
    """`roofline_us` is what arithmetic and traffic take at that machine's best, `runner_up` the
    fastest of the other candidates that were measured, None if there was no other.
    """

    us: float
    roofline_us: float
    runner_up: tuple[Candidate, float] | None = None

    def to_json(self) -> dict[str, Any]:
        other = None
        if self.runner_up is not None:
            candidate, us = self.runner_up
            other = {**candidate.to_json(), "us": _rounded(us)}
        times = {"us": _rounded(self.us), "roofline_us": _rounded(self.roofline_us)}
        return {**times, "runner_up": other}

    @staticmethod
    def from_json(data: Any) -> StepTimes:
        """Raises InvalidPlan for what `to_json` would not write."""
        _require_fields(data, FIELDS)
        other, runner_up = data["runner_up"], None
        if other is not None:
            _require_fields(other, {"family", "config", "us"})
            if type(other["family"]) is not str or type(other["config"]) is not dict:
                raise InvalidPlan(f"runner_up: must be a candidate, got {other!r:.80}")
            try:
                runner_up = Candidate.from_json(other), _time(other["us"])
            except (TypeError, ValueError) as error:
                raise InvalidPlan(f"runner_up: {error}") from error
        return StepTimes(_time(data["us"]), _time(data["roofline_us"]), runner_up)


def _require_fields(data: Any, wanted: set[str]) -> None:
    if not isinstance(data, dict) or set(data) != wanted:
        raise InvalidPlan(f"must be an object of {', '.join(sorted(wanted))}, got {data!r:.80}")


def _time(value: Any) -> float:
    if type(value) is not float or not 0 <= value < math.inf:
        raise InvalidPlan(f"a time must be a float, 0 or more, got {value!r:.80}")
    return value


def _rounded(us: float) -> float:
    return float(f"{us:.{DIGITS}g}")
