"""Every bold figure of README's results is in a recorded file of benchmarks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from .conftest import ROOT

FIGURE = re.compile(r"\*\*(\d+\.\d+)(?: ms)?\*\*")
KEYS = ("ratio", "ratio_live", "median", "median_ms")


def recorded(document: Any) -> Iterator[float]:
    """The medians and ratios of a file."""
    if isinstance(document, list):
        for part in document:
            yield from recorded(part)
    elif isinstance(document, dict):
        yield from (document[k] for k in KEYS if isinstance(document.get(k), float))
        for part in document.values():
            yield from recorded(part)


def bold_figures() -> list[str]:
    return FIGURE.findall((ROOT / "README.md").read_text())


@pytest.fixture(scope="module")
def known() -> list[float]:
    files = sorted((ROOT / "benchmarks").rglob("*.json"))
    return [value for file in files for value in recorded(json.loads(file.read_text()))]


@pytest.mark.parametrize("figure", bold_figures())
def test_it_was_measured(figure: str, known: list[float]) -> None:
    digits = len(figure.partition(".")[2])
    assert any(f"{value:.{digits}f}" == figure for value in known), figure


def test_there_are_some() -> None:
    assert len(bold_figures()) > 10
