"""Every command explains itself, and `plantune --help` loads nothing that would make it slow."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from plantune.cli import main

from .conftest import ROOT, Run

# Beside Python's own modules. What the interpreter's site loads at its start is not counted.
LIGHT = {"click", "plantune"}


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


LOADED = """
import sys
before = set(sys.modules)
from plantune.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print(*{name.partition(".")[0] for name in set(sys.modules) - before}, file=sys.stderr)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["search", "--help"], ["bench", "--batch", "0"]])
def test_help_and_wrong_usage_load_nothing_heavy(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(done.stderr.splitlines()[-1].split())
    assert loaded - sys.stdlib_module_names == LIGHT
