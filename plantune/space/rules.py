"""What a value in a search-space file must be, and the errors for one that is not."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from plantune.errors import InvalidSearchSpace


@dataclass(frozen=True)
class Rule:
    """What one value must be; the text completes the sentence "give ..."."""

    text: str
    accepts: Callable[[Any], bool]


def whole_number(low: int, high: int, multiple_of: int = 1) -> Rule:
    """An integer in a range, both ends included; a bool is none."""
    step = f", a multiple of {multiple_of}" if multiple_of > 1 else ""
    return Rule(
        f"a whole number from {low} to {high}{step}",
        lambda value: type(value) is int and low <= value <= high and value % multiple_of == 0,
    )


def one_of(*words: str | float) -> Rule:
    """One of a few values; 1 and true are two different ones."""
    return Rule(
        " or ".join(repr(word) for word in words),
        lambda value: any(type(value) is type(word) and value == word for word in words),
    )


def quantity(low: float, high: float) -> Rule:
    """A number in a range, both ends included; a bool is none, and neither is NaN."""
    return Rule(
        f"a number from {low:g} to {high:g}",
        lambda value: type(value) in (int, float) and low <= value <= high,
    )


def pattern(form: str, example: str) -> Rule:
    """A text that matches a regular expression as a whole."""
    return Rule(
        f"a text such as {example!r}",
        lambda value: isinstance(value, str) and re.fullmatch(form, value) is not None,
    )


def invalid(place: str, got: object, remedy: str) -> InvalidSearchSpace:
    """The error that says where, what was got, and what to give instead."""
    return InvalidSearchSpace(f"{place}: got {got!r}; give {remedy}")


def require(place: str, value: Any, rule: Rule) -> None:
    """Refuse a value that `rule` does not accept."""
    if not rule.accepts(value):
        raise invalid(place, value, rule.text)


def require_keys(
    place: str, table: Mapping[str, Any], required: Collection[str], optional: Collection[str] = ()
) -> None:
    """Refuse a table that lacks a required key or holds one that is not known."""
    known = (*required, *optional)
    for key in table:
        if key not in known:
            raise invalid(f"{place}: unknown key", key, f"only {', '.join(known)}")
    missing = [key for key in required if key not in table]
    if missing:
        raise InvalidSearchSpace(f"{place}: missing {', '.join(missing)}; add what is missing")


def require_list(
    place: str, value: Any, rule: Rule, *, may_be_empty: bool = False
) -> tuple[Any, ...]:
    """The items of a list that repeats nothing and holds only what `rule` accepts."""
    if not isinstance(value, list) or not (value or may_be_empty):
        raise invalid(place, value, f"a list of one or more values, each {rule.text}")
    for index, item in enumerate(value):
        require(f"{place}[{index}]", item, rule)
        if item in value[:index]:
            raise invalid(f"{place}[{index}]", item, "each value once")
    return tuple(value)


TABLE = Rule("a table", lambda value: isinstance(value, dict))
