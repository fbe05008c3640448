"""Every command explains itself, and `plantune --help` answers at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import click
import pytest

from plantune.cli import main

from .conftest import ROOT, Run

LIMIT_S = 0.5
HEAVY = ("torch", "numpy", "optuna", "sqlalchemy", "sqlite_utils", "matplotlib")


def commands(
    group: click.Group = main, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, click.Command]]:
    """Every command with its whole name, groups too."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield " ".join((*path, name)), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


ALL = dict(commands())
LEAVES = {name: command for name, command in ALL.items() if not isinstance(command, click.Group)}


def test_the_verbs_are_those_of_the_design() -> None:
    verbs = [
        "doctor",
        "search",
        "export",
        "import",
        "plans",
        "explain",
        "verify",
        "bench",
        "profile",
        "cache",
    ]
    assert list(main.list_commands(click.Context(main))) == verbs
    assert {"plans list", "plans show", "plans diff", "plans rm"} <= set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_each_command_has_help_with_an_example_of_itself(run: Run, name: str) -> None:
    result = run(*name.split(), "--help")
    assert result.exit_code == 0
    assert f"Example:\n    plantune {name}" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("name", LEAVES)
def test_each_command_takes_json_and_db(name: str) -> None:
    options = {option for p in LEAVES[name].params for option in p.opts}
    assert {"--json", "--db"} <= options


@pytest.mark.parametrize("name", ["search", "bench", "explain", "verify", "profile"])
def test_a_key_is_named_in_the_same_way_everywhere(name: str) -> None:
    options = {option for p in LEAVES[name].params for option in p.opts}
    assert {"--model", "--arch", "--batch", "--in-channels", "--mode", "--dtype"} <= options


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("arguments", [["--help"], ["search", "--help"], ["bench", "--batch", "0"]])
def test_help_and_wrong_usage_load_nothing_heavy(arguments: list[str]) -> None:
    code = f"""
import sys
from plantune.cli import main
try:
    main({arguments!r})
except SystemExit:
    pass
loaded = {{name.partition(".")[0] for name in sys.modules}}
sys.exit(",".join(loaded & set({HEAVY!r})) or 0)
"""
    done = python(code)
    assert done.returncode == 0, f"loaded: {done.stderr}"


def test_help_answers_in_under_half_a_second() -> None:
    times = []
    for _ in range(5):  # the machine may be busy for a moment
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "plantune", "--help"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        times.append(time.perf_counter() - start)
        if times[-1] < LIMIT_S:
            return
    pytest.fail(f"took {min(times):.2f} s")
