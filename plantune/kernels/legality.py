"""Legality as a flat list of conditions: each reason to refuse, and whether it holds."""

from __future__ import annotations

from collections.abc import Mapping

from plantune.errors import IllegalCandidate


def first_reason(reasons: Mapping[str, object]) -> str | None:
    """The first reason that holds, None if none does."""
    return next((reason for reason, holds in reasons.items() if holds), None)


def refuse(reasons: Mapping[str, object]) -> None:
    """Raises IllegalCandidate with the first reason that holds."""
    reason = first_reason(reasons)
    if reason is not None:
        raise IllegalCandidate(reason)
