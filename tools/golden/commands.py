"""What the command line says: its help, its JSON and its exit codes, without the machine's own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import click
from click.testing import CliRunner
from entry import command_line, data_folder, network_names

# Keys whose values are the machine's, the day's or the folder's.
OF_MACHINE = {"environment", "created_at", "match", "database", "file", "seconds", "known"}
OF_MACHINE |= {"from", "path", "here", "checks", "cache", "bytes"}
TRIES = 5
WRONG: tuple[tuple[str, ...], ...] = (
    ("search", "--no-such-option"),
    ("search", "--model", "resnet19", "--batch", "1"),
    ("search", "--batch", "0"),
    ("search", "--arch", "sm90", "--input", "1x"),
    ("bench", "--peers", "nothing", "--batch", "1", "--arch", "cpu"),
    ("bench", "--step", "--batch", "1", "--arch", "cpu"),
    ("verify", "999"),
    ("explain", "--batch", "3", "--in-channels", "5", "--arch", "cpu"),
    ("plans", "show", "999"),
    ("plans", "rm", "999"),
    ("plans", "diff", "1", "999"),
    ("import", "/no/such/file.db"),
    ("export", "/no/such/folder/cpu.db"),
    ("nothing",),
)


def commands() -> Iterator[tuple[str, Any]]:
    """In a cache of its own, so that nobody's plans are seen."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PLANTUNE_CACHE_DIR"] = folder
        os.environ.pop("COLUMNS", None)
        yield from _help()
        yield from (_told(*each, "--json") for each in WRONG)
        for arch in sorted(path.stem for path in data_folder("plans").glob("*.db")):
            path = str(data_folder("plans") / f"{arch}.db")
            yield _told("plans", "list", "--all", "--from", path, "--json")
            yield _told("import", path, "--json")
        yield _told("plans", "list", "--all", "--json")
        yield from _of_each_plan()
        for network in network_names():
            for mode in ("infer", "train"):
                named = ("--model", network, "--arch", "cpu", "--batch", "4", "--mode", mode)
                yield _told("search", *named, "--dry-run", "--json")
        yield _told("doctor", "--json", keys=True)
        yield _told("cache", "show", "--json", keys=True)


def _of_each_plan() -> Iterator[tuple[str, Any]]:
    _, listed = _told("plans", "list", "--all", "--json", raw=True)
    ids = sorted(item["id"] for item in listed["plans"] if item["id"] is not None)
    for id in ids:
        yield _told("plans", "show", str(id), "--json")
        yield _told("plans", "export", str(id))
    for id in ids[:: max(len(ids) // 8, 1)]:
        yield _told("explain", str(id), "--json")
    if len(ids) > 1:
        yield _told("plans", "diff", str(ids[0]), str(ids[1]), "--json")


def _help() -> Iterator[tuple[str, Any]]:
    yield _told("--help")
    for name in _names(command_line, ()):
        yield _told(*name, "--help")


def _names(group: click.Group, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from _names(command, (*path, name))


def _told(*arguments: str, keys: bool = False, raw: bool = False) -> tuple[str, Any]:
    """The command with its exit code and output; of some only which keys its JSON has."""
    done = CliRunner().invoke(command_line, list(arguments), prog_name="plantune")
    shown = [Path(word).name if word.endswith(".db") else word for word in arguments]
    try:
        output: Any = json.loads(done.stdout)
    except ValueError:
        output = done.stdout.splitlines()
    if raw:
        return "", output
    output = sorted(_keys(output)) if keys else _without_machine(output)
    errors = [] if keys else [_plain(line) for line in done.stderr.splitlines()]
    return " ".join(shown), {"exit": done.exit_code, "stdout": output, "stderr": errors}


def _without_machine(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: "..." if k in OF_MACHINE else _without_machine(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_machine(item) for item in value]
    return _plain(value) if isinstance(value, str) else value


def _plain(text: str) -> str:
    """Without the folder of the cache."""
    return text.replace(os.environ["PLANTUNE_CACHE_DIR"], "CACHE")


def _keys(value: Any, place: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _keys(item, f"{place}.{key}")
    elif isinstance(value, list):
        for item in value:
            yield from _keys(item, f"{place}[]")
    else:
        yield re.sub(r"\d+", "N", place)


def times() -> dict[str, float]:
    """Seconds of a process, the median of some: not compared, but shown beside each other."""
    return {name: _seconds(*command) for name, command in _TIMED.items()}


_TIMED = {
    "python": ("-c", ""),
    "import torch": ("-c", "import torch"),
    "import plantune": ("-c", "import plantune"),
    "plantune.optimize": ("-c", "import plantune; plantune.optimize"),
    "plantune --help": ("-m", "plantune", "--help"),
    "plantune search --help": ("-m", "plantune", "search", "--help"),
}


def _seconds(*arguments: str) -> float:
    took = []
    for _ in range(TRIES):
        began = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        took.append(time.perf_counter() - began)
    return round(median(took), 3)
