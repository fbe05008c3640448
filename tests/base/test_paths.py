"""Where plantune's files are."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from plantune.base.paths import cache_folder, team_plans
from plantune.errors import PlantuneWarning


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("PLANTUNE_CACHE_DIR", "XDG_CACHE_HOME", "PLANTUNE_PLANS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ({}, "home/.cache/plantune"),
        ({"XDG_CACHE_HOME": "relative"}, "home/.cache/plantune"),
        ({"PLANTUNE_CACHE_DIR": "~/own"}, "home/own"),
        ({"PLANTUNE_CACHE_DIR": "~nobody_here/own"}, "~nobody_here/own"),
        ({"PLANTUNE_CACHE_DIR": ""}, "home/.cache/plantune"),
    ],
)
def test_the_cache_folder(
    named: dict[str, str], found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    assert cache_folder().absolute() == tmp_path / found


def test_the_plans_of_a_team_may_be_at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTUNE_PLANS", "~/team.db")
    assert team_plans() == (home / "team.db",)


def test_a_folder_that_cannot_be_written_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    why = "file/cache: Not a directory.*name another folder"
    with pytest.warns(PlantuneWarning, match=why) as said:
        folder = cache_folder()
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache_folder() == folder  # it is said once
