"""The maps of folders, in their `__init__.py`, name what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "plantune"


@pytest.mark.parametrize(
    "folder", ["kernels", "measure", "plan_db", "runtime", "search", "training"]
)
def test_what_a_map_names_is_there(folder: str) -> None:
    place = PACKAGE / folder
    named = re.findall(r"`(\w+)`", (place / "__init__.py").read_text(encoding="utf-8"))
    assert len(named) > 10
    gone = [n for n in named if not ((place / n).is_dir() or (place / f"{n}.py").is_file())]
    assert not gone, f"{folder}/__init__.py names {gone}"
