"""The wheel holds all that plantune reads at run time, and works without the checkout."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ..conftest import run

ROOT = Path(__file__).resolve().parents[2]
DATA = ("csrc", "plans", "search_spaces")

USE = """
import plantune, torch
from plantune.base import paths
from plantune.graph.fusions import all_fusions
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

print(plantune.__file__)
for name in ("csrc", "plans", "search_spaces"):
    print(paths.data_folder(name))
assert load_search_space("cpu").arch.name == "cpu"
assert load_search_space("sm90").arch.name == "sm90"
assert all_fusions()
x = torch.randn(1, 3, 64, 64)
model = plantune.load_model("se_resnet9_fixup", batch=1)
assert torch.allclose(model(x), model.reference(x), rtol=1e-3, atol=1e-4)
"""


def files(folder: Path) -> set[str]:
    found = (path for path in folder.rglob("*") if path.is_file())
    kept = (path for path in found if "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix() for path in kept}


@pytest.mark.parametrize("name", DATA)
def test_the_wheel_carries_the_data(name: str, unpacked: Path) -> None:
    carried = files(unpacked / "plantune" / "_data" / name)
    assert carried == files(ROOT / name)
    assert carried


def test_the_wheel_carries_the_package_and_nothing_else(unpacked: Path) -> None:
    modules = {name for name in files(ROOT / "plantune") if not name.startswith("_data/")}
    carried = {name for name in files(unpacked / "plantune") if not name.startswith("_data/")}
    assert carried == modules
    tops = {path.name for path in unpacked.iterdir()}
    assert {name for name in tops if not name.endswith(".dist-info")} == {"plantune"}
    assert {"cpu.toml", "sm90.toml"} <= files(unpacked / "plantune/_data/search_spaces")


def test_the_wheel_works_in_another_folder(unpacked: Path, tmp_path: Path) -> None:
    quiet = "ignore:Failed to initialize NumPy:UserWarning"
    done = run(
        [sys.executable, "-W", quiet, "-c", USE],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(unpacked),
            "PLANTUNE_CACHE_DIR": str(tmp_path / "cache"),
        },
    )
    assert done.returncode == 0, done.stderr
    places = [Path(line) for line in done.stdout.splitlines()]
    assert len(places) == 1 + len(DATA)
    assert all(place.is_relative_to(unpacked) for place in places), places
