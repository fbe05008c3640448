"""Search-space files: their outer form, and what they include."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plantune.errors import InvalidSearchSpace
from plantune.space.rules import TABLE, one_of, pattern, require, require_keys


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
