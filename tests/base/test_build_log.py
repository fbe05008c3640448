"""What compilers write is kept in files, and no message holds more of it than the first error."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from plantune.base import build_log
from plantune.base.build_log import ERROR_LENGTH, build_error, first_error
from plantune.errors import BuildError


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(tmp_path))
    return tmp_path / "logs"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("kernel.cu(3): error: expected a ';'", "expected a ';'"),
        ('k.cu(1): catastrophic error: cannot open source file "a.h"', "cannot open source file"),
        ("kernel.cu(3): error #20: identifier x is undefined", "identifier x is undefined"),
        ("ptxas error   : Entry function uses too much shared data", "Entry function uses too"),
        ("/tmp/k.cpp:1:10: fatal error: omp.h: No such file or directory", "omp.h: No such file"),
        ("nvrtc: error: invalid value for --gpu-architecture", "invalid value for"),
        ("2 errors detected in the compilation", ""),
        ("error: " + "x" * 1000, "x" * ERROR_LENGTH),
    ],
)
def test_the_first_error_is_found(line: str, said: str) -> None:
    found = first_error(f"In file included from a.h:\n{line}\n  source code\nerror: another")
    assert found.startswith(said if said else "another")


def test_no_error_is_announced() -> None:
    assert first_error("Segmentation fault") == ""
    assert build_error("it died", "Segmentation fault").what == "it died"


def test_everything_is_in_the_file(folder: Path) -> None:
    error = build_error("it failed", "the log", "the command and the source")
    (kept,) = folder.iterdir()
    assert str(error).startswith(f"it failed; its log is in {kept}, `plantune doctor` ")
    for part in ("it failed", "the log", "the command and the source"):
        assert part in kept.read_text()


def test_equal_failures_have_one_file(folder: Path) -> None:
    assert build_error("a", "b").path == build_error("a", "b").path != build_error("a", "c").path
    assert len(list(folder.iterdir())) == 2


def test_where_nothing_can_be_written_there_is_no_path(folder: Path) -> None:
    folder.write_text("a file in its place")
    error = build_error("it failed", "error: no")
    assert (str(error), error.log) == ("it failed: no", "error: no")


def test_the_oldest_are_dropped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_log, "KEPT_LOGS", 2)
    for number in range(4):
        path = build_error("it failed", str(number)).path
        assert path is not None
        os.utime(path, (number, number))
    assert sorted(path.stat().st_mtime for path in folder.iterdir()) == [2, 3]


def test_it_travels_between_processes() -> None:
    error = build_error("it failed", "error: no")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.log, again.path) == (str(error), error.log, error.path)


def test_only_the_first_line_of_a_message_is_shown() -> None:
    error = BuildError("it failed\nint main() {}\n")
    assert (str(error), error.log) == ("it failed", "int main() {}")
