"""docs/cli.md has every command, every option and every exit code, and nothing else."""

from __future__ import annotations

import re

import click
import pytest

from plantune.cli.exit_codes import MEANINGS
from plantune.models.registry import network_names

from .conftest import ROOT, start
from .test_help import ALL, LEAVES

TEXT = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
SHARED = ("--json", "--db", "--model", "--arch", "--batch", "--in-channels", "--mode", "--dtype")
SHARED += ("--image-size", "--input", "--set", "--from")


def options_of(command: click.Command) -> set[str]:
    declared = (p for p in command.params if isinstance(p, click.Option))
    return {name for p in declared for name in (*p.opts, *p.secondary_opts)}


def section(name: str) -> str:
    """The part under the heading that names a command's first word."""
    parts = re.split(r"^## ", TEXT, flags=re.MULTILINE)
    return next(part for part in parts if f"plantune {name}" in part.splitlines()[0])


@pytest.mark.parametrize("name", ALL)
def test_each_command_is_documented(name: str) -> None:
    assert f"plantune {name}" in TEXT


@pytest.mark.parametrize("name", LEAVES)
def test_each_option_is_documented_in_its_section(name: str) -> None:
    own = section(name.split(maxsplit=1)[0])
    for option in options_of(LEAVES[name]):
        place = TEXT if option in SHARED else own
        assert re.search(rf"{option}\b", place), f"{name} {option}"


def test_each_documented_option_is_there() -> None:
    known = {option for command in LEAVES.values() for option in options_of(command)}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT))
    assert named <= known | {"--help", "--version"}


def test_each_exit_code_is_documented() -> None:
    for code, meaning in MEANINGS.items():
        assert f"| {code} | {meaning} |" in TEXT


def test_each_network_is_documented() -> None:
    assert all(f"`{name}`" in TEXT for name in network_names())


def test_the_documented_completion_works() -> None:
    with start(_PLANTUNE_COMPLETE="bash_source") as process:
        output, _ = process.communicate()
    assert process.returncode == 0
    assert b"_PLANTUNE_COMPLETE=bash_complete" in output
    words = {"COMP_WORDS": "plantune search --model resnet", "COMP_CWORD": "3"}
    with start(_PLANTUNE_COMPLETE="bash_complete", **words) as process:
        output, _ = process.communicate()
    assert output.split() == [b"plain,resnet18", b"plain,resnet34", b"plain,resnet50"]
