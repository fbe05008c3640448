"""tools/gpu_suite names every route there is: else one would be missing from what it records."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from subprocess import PIPE

from plantune.measure.racing.routes import framework_routes

SUITE = Path(__file__).resolve().parents[2] / "tools" / "gpu_suite"


def test_all_routes_are_raced() -> None:
    text = SUITE.read_text(encoding="utf-8")
    quick = ",".join(re.findall(r"^quick=(?:\$quick,)?(.*)$", text, re.MULTILINE)).split(",")
    slow = re.findall(r"^slow=\((.*)\)$", text, re.MULTILINE)[0].split()
    assert sorted(quick + slow) == sorted(framework_routes("sm90"))


def test_pieces_run_tools_that_are_there_and_say_what_fails(tmp_path: Path) -> None:
    """Of `calls` and `warm`, with a python that only says what it was asked for."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\ncase "$1" in tools/*) test -e "$1" ;; esac\n')
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python)}
    asked = [str(SUITE), str(tmp_path / "out"), "warm", "calls"]
    done = subprocess.run(asked, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    warmed = (tmp_path / "out" / "warm.log").read_text().splitlines()
    assert sum("--model resnet18 --batch 64" in line for line in warmed) == 1
    assert len(warmed) == 7
    assert "studies/calls.py" in (tmp_path / "out" / "calls.jsonl").read_text()
    asked[-1] = "no-piece"
    assert subprocess.run(asked, env=environment, check=False, stderr=PIPE).returncode == 2


def test_help_says_how_and_runs_nothing(tmp_path: Path) -> None:
    for asked, code in ((["--help"], 0), ([], 2), (["--pieces"], 2)):
        done = subprocess.run([SUITE, *asked], cwd=tmp_path, check=False, capture_output=True)
        assert done.returncode == code
        assert b"tools/gpu_suite OUTDIR" in done.stderr
    assert not [*tmp_path.iterdir()]
