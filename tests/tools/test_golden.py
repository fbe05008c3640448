"""tools/golden: what must stay equal while files move, written and compared."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..conftest import ROOT

TOOL = ROOT / "tools" / "golden"


@pytest.fixture
def golden(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    return runpy.run_path(str(TOOL / "__main__.py"))


def test_what_differs_is_named_by_its_place(golden: dict[str, Any]) -> None:
    one = {"a": {"steps": ["x", "y"]}, "b": 1, "c": 2}
    other = {"a": {"steps": ["x", "z"]}, "b": 1, "d": 3}
    assert golden["differences"](one, other) == [
        'a / steps[1]: "y" -> "z"',
        "c: 2 -> nothing",
        "d: nothing -> 3",
    ]
    assert golden["differences"](one, dict(one)) == []


def test_times_are_shown_and_not_compared(
    golden: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / name for name in ("before", "after")]
    for number, folder in enumerate(folders):
        folder.mkdir()
        (folder / "times.json").write_text(json.dumps({"import": number}))
        (folder / "plans.json").write_text("{}")
    assert golden["compare"](*folders) == 0
    assert '{"import": 0} before, {"import": 1} after' in capsys.readouterr().out
    (folders[1] / "plans.json").unlink()
    assert golden["compare"](*folders) == 1


def test_a_part_is_written_and_equal_to_itself(tmp_path: Path) -> None:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(TOOL), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    wrote = run("write", tmp_path / "one", "--only", "spaces")
    assert wrote.returncode == 0, wrote.stderr
    spaces = json.loads((tmp_path / "one" / "spaces.json").read_text())
    assert {"cpu", "sm70", "sm90", "sm120", "fusions"} <= set(spaces)
    assert spaces["sm90"]["configs"]["hopper_conv"] > 0
    same = run("compare", tmp_path / "one", tmp_path / "one")
    assert (same.returncode, same.stdout) == (0, "spaces.json: equal\n")
