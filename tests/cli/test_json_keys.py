"""What scripts read: the keys of each command's JSON are those of json_keys.json.

A new key is added there. One that is missing breaks somebody's script: say so in CHANGELOG.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plantune.plans.plan import Plan

from .conftest import FakeWorker, Run, object_of

KNOWN = Path(__file__).with_name("json_keys.json")
# Dicts whose keys are data, or depend on the machine.
DATA = {"config", "environment", "evidence", "failures", "families", "kernels"}
DATA |= {"phases_s", "plan", "ratios", "saved"}
COMMANDS: dict[str, tuple[object, ...]] = {
    "bench": ("bench", "--batch", 1, "--peers", "eager,torchscript"),
    "cache clear": ("cache", "clear"),
    "cache show": ("cache", "show"),
    "explain": ("explain", "--batch", 1),
    "export": ("export", "plans.db"),
    "import": ("import", "plans.db"),
    "plans diff": ("plans", "diff", 1, 2),
    "plans list": ("plans", "list", "--all"),
    "plans rm": ("plans", "rm", 1),
    "plans show": ("plans", "show", 1),
    "profile": ("profile", "--batch", 1),
    "search": ("search", "--batch", 1, "--budget", 5, "--no-shipped"),
    "search --dry-run": ("search", "--batch", 1, "--dry-run"),
    "verify": ("verify", "--batch", 1, "--budget", 1),
}


def keys(value: Any, place: str = "") -> set[str]:
    """The paths of all keys; `[]` stands for the items of a list, `*` for any key."""
    if isinstance(value, list):
        return set().union(*(keys(item, f"{place}[]") for item in value))
    if not isinstance(value, dict):
        return {place}
    if place.rpartition(".")[2] in DATA:
        return {f"{place}.*"}
    below = f"{place}." if place else ""
    return set().union(*(keys(item, f"{below}{key}") for key, item in value.items()))


@pytest.fixture
def stored(
    store: Callable[..., int],
    plan: Plan,
    fused_plan: Plan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store(plan)
    store(fused_plan)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize("name", COMMANDS)
def test_they_are_the_known_ones(name: str, run: Run, worker: FakeWorker) -> None:
    if name == "import":
        run("export", "plans.db")
    found = run(*COMMANDS[name], "--json")
    assert found.exit_code == 0, found.stderr
    assert sorted(keys(object_of(found))) == json.loads(KNOWN.read_text())[name]


def test_no_command_is_forgotten() -> None:
    assert sorted(json.loads(KNOWN.read_text())) == sorted(COMMANDS)
