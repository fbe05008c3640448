"""Closed pipes, odd locales, odd paths, colours: in processes of their own."""

from __future__ import annotations

import json
import os
import pty
from collections.abc import Callable
from pathlib import Path

import pytest

from plantune.plans.plan import Plan

from .conftest import Run, object_of, start


def test_a_closed_pipe_is_quiet() -> None:
    with start("cache", "show", "--json") as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        errors = process.stderr.read()
    assert process.returncode == 1
    assert b"Traceback" not in errors
    assert b"BrokenPipe" not in errors


def test_a_closed_stderr_stops_nothing() -> None:
    with start("cache", "show", "--json") as process:
        assert process.stderr is not None
        process.stderr.close()
        assert process.stdout is not None
        assert json.loads(process.stdout.read())["kernels"] == {}
    assert process.returncode == 0


@pytest.mark.parametrize(
    "locale", [{"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}, {"PYTHONIOENCODING": "ascii"}]
)
def test_odd_locales_and_paths_work_together(tmp_path: Path, locale: dict[str, str]) -> None:
    folder = tmp_path / "pläne für ünterwegs\n#?%20"
    folder.mkdir()
    process = start("cache", "show", PLANTUNE_CACHE_DIR=str(folder), **locale)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert b"no kernels" in output
    assert os.fsencode(folder) in output
    assert errors == b""


def test_a_path_that_is_not_utf8_works(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/\xff\xfe"
    os.mkdir(folder)
    process = start("plans", "list", "--json", "--db", os.fsdecode(folder + b"/plans.db"))
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert json.loads(output)["plans"] == []


@pytest.mark.parametrize(
    ("no_color", "term", "escapes"),
    [("", "xterm", True), ("1", "xterm", False), ("", "dumb", False)],
)
def test_no_color_is_honoured_on_a_terminal(no_color: str, term: str, escapes: bool) -> None:
    ours, theirs = pty.openpty()
    with start("plans", "show", "one", NO_COLOR=no_color, TERM=term, stderr=theirs):
        pass
    os.close(theirs)
    text = os.read(ours, 1 << 16)
    os.close(ours)
    assert b"error:" in text
    assert (b"\x1b[" in text) == escapes


def test_results_go_through_a_pipe_and_progress_does_not(tmp_path: Path) -> None:
    with start("plans", "list", "--db", tmp_path / "a.db") as process:
        output, errors = process.communicate()
    assert b"no plans" in output
    assert errors == b""


def test_json_stands_alone_on_stdout(run: Run, store: Callable[..., int], plan: Plan) -> None:
    id = store(plan)
    for command in (
        ("doctor",),
        ("plans", "list"),
        ("plans", "show", id),
        ("plans", "diff", id, id),
        ("explain", id),
        ("cache", "show"),
        ("search", "--batch", 1, "--dry-run"),
    ):
        result = run(*command, "--json")
        assert object_of(result)
        assert result.stderr == "", command
