"""The map of a folder, in its `__init__.py`, names what is there, and leaves nothing out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import plantune

ROOT = Path(plantune.__file__).parent
# In these each name says what the file has, or their `__init__.py` is code.
WITHOUT = {
    "backend",
    "cli",
    "devices/cuda",
    "graph",
    "graph/ops",
    "graph/spelling",
    "models",
    "space",
}
WITHOUT |= {"kernels/cutlass", "kernels/hopper", "kernels/patterns", "report"}
WITHOUT |= {"kernels/families", "kernels/families/se_resnet9", "."}


def folders() -> list[str]:
    every = {str(path.parent.relative_to(ROOT)) for path in ROOT.rglob("*.py")}
    return sorted(every - WITHOUT)


@pytest.mark.parametrize("folder", folders())
def test_a_map_names_what_is_there(folder: str) -> None:
    place = ROOT / folder
    named = re.findall(r"`(\w+)`", (place / "__init__.py").read_text(encoding="utf-8"))
    there = {path.stem for path in place.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert set(named) == there - {"__init__", "__pycache__"}
    assert len(named) == len(set(named)), "one of them is named twice"
