"""CONTRIBUTING's walk is true: what its table names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
# File, and the words in code of the last column.
ROWS = [
    (file, re.findall(r"`([^`]+)`", words))
    for file, words in re.findall(
        r"^\| [^|]+ \| `([\w/]+\.\w+)` \| ([^|]+) \|$", TEXT, re.MULTILINE
    )
]


@pytest.mark.parametrize(("file", "words"), ROWS)
def test_each_row_names_what_its_file_holds(file: str, words: list[str]) -> None:
    content = (ROOT / file).read_text(encoding="utf-8")
    for word in words:
        assert word.rpartition(" ")[2].rpartition(".")[2] in content, word


def test_the_walk_has_its_rows() -> None:
    assert len(ROWS) >= 7


@pytest.mark.parametrize("text", [TEXT, PAGE], ids=["CONTRIBUTING", "architecture"])
def test_each_file_that_is_named_exists(text: str) -> None:
    named = set(re.findall(r"`((?:\w+/)+[\w.]*\w)`", text))
    assert len(named) > 10
    homes = (ROOT, ROOT / "plantune")
    assert {name for name in named if not any((home / name).exists() for home in homes)} == set()
