"""Legality as a flat list of conditions: each reason to refuse, and whether it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plantune.errors import IllegalCandidate
from plantune.graph import Step

READ_OUTSIDE = "a value before the end of the step is read outside of it"


def first_reason(reasons: Mapping[str, object]) -> str | None:
    """The first reason that holds, None if none does."""
    return next((reason for reason, holds in reasons.items() if holds), None)


def refuse(reasons: Mapping[str, object]) -> None:
    """Raises IllegalCandidate with the first reason that holds."""
    reason = first_reason(reasons)
    if reason is not None:
        raise IllegalCandidate(reason)


def not_the_end_alone(step: Step) -> dict[str, bool]:
    """The reason to refuse a step that more than its last value leaves, and whether it holds."""
    return {READ_OUTSIDE: [name for name, _ in step.outputs] != [step.nodes[-1].name]}


def not_of(step: Step, dtype: str, *names: str | None) -> dict[str, bool]:
    """The reasons to refuse operands that are in memory as another element type, and whether each
    holds.
    """
    types = {name: step.types[name].dtype for name in names if name is not None}
    return {
        f"{name!r} is of {found}, not of {dtype}": found != dtype for name, found in types.items()
    }


def not_within(padding: Sequence[int], kernel: Sequence[int]) -> dict[str, bool]:
    """The reason to refuse a padding that is as wide as the kernel, and whether it holds."""
    wide = any(pad >= size for pad, size in zip(padding, kernel, strict=True))
    return {f"the padding {padding} is not smaller than the kernel {kernel}": wide}
