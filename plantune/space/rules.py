"""Files of search spaces: their form, what a value in one must be, and the errors for others."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plantune.base.nearest import hint
from plantune.errors import InvalidSearchSpace


@dataclass(frozen=True, eq=False)
class SpaceFile:
    """A search-space file whose outer form is right: its tables, and its path for messages."""

    path: Path
    facts: Mapping[str, Any]
    families: Mapping[str, Any]
    chip: Mapping[str, Any] | None = None
    costs: Mapping[str, Any] = field(default_factory=dict)


def read_space_file(path: Path) -> str:
    """The text of one of plantune's own files."""
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError) as error:
        raise InvalidSearchSpace(f"{path}: {error}; install plantune again") from error


def _parsed(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidSearchSpace(
            f"{path}: got text that is not TOML, correct it: {error}"
        ) from error


def parse_space_file(text: str, path: Path) -> SpaceFile:
    """Check the syntax and the outer form of a search-space file's text; add what it includes."""
    document = _parsed(text, path)
    source = "include" if "include" in document else "families"
    required, optional = ("arch", "facts", source), ("chip", "families", "costs")
    require_keys(f"{path}: top level", document, required, optional)
    require(f"{path}: arch", document["arch"], one_of(path.stem))
    for name in ("facts", "families", "chip", "costs"):
        require(f"{path}: [{name}]", document.get(name, {}), TABLE)
    common = _included(path, document["include"]) if "include" in document else {}
    families, costs = (
        _over(common.get(name, {}), document.get(name, {})) for name in ("families", "costs")
    )
    return SpaceFile(path, document["facts"], families, document.get("chip"), costs)


def _included(path: Path, name: Any) -> Mapping[str, Any]:
    """The families and costs of the file that an arch's file includes, from the same folder."""
    require(f"{path}: include", name, pattern(r"[a-z][a-z0-9_]*", "cuda"))
    beside = path.with_name(f"{name}.toml")
    document = _parsed(read_space_file(beside), beside)
    require_keys(f"{beside}: top level", document, ("families",), ("costs",))
    for table in document:
        require(f"{beside}: [{table}]", document[table], TABLE)
    return document


def _over(included: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """The included tables, with the arch's own values in place of theirs; then its own tables.

    A family that is not a table is kept, to be refused with all other wrong values.
    """
    merged = dict(included)
    for family, axes in own.items():
        theirs = included.get(family, {})
        both = TABLE.accepts(theirs) and TABLE.accepts(axes)
        merged[family] = {**theirs, **axes} if both else axes
    return merged


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
            wanted = f"only {', '.join(known)}{hint(key, known)}"
            raise invalid(f"{place}: unknown key", key, wanted)
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
