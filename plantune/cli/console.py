"""Where output goes: results to stdout, as text or as one JSON object; all else to stderr."""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import click

from plantune.base.files import require_replaceable, write_whole
from plantune.base.storage_urls import without_secrets
from plantune.cli.stdout import results
from plantune.errors import PlantuneWarning
from plantune.report.tables import table

STDOUT = "-"


@dataclass(frozen=True)
class Console:
    """The output of one command. `json` is None, "-" for stdout, or the path of a file."""

    json: str | None = None

    @property
    def json_file(self) -> Path | None:
        """The file that gets the JSON object, if one does."""
        return None if self.json in (None, STDOUT) else Path(str(self.json))

    @property
    def width(self) -> int | None:
        """How long a line of results may be; None if they go into a file or another program."""
        return width_of(results())

    def say(self, text: str = "") -> None:
        """Results as text; nothing where stdout gets the JSON object."""
        if self.json != STDOUT:
            self.print(text)

    def print(self, text: str) -> None:
        """As it is, also where stdout gets the JSON object."""
        click.echo(text, results(), color=None if wants_color() else False)

    def table(self, titles: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> None:
        """A table as wide as there is room; see `plantune.report.tables.table`."""
        self.say(table(titles, rows, align, self.width))

    def emit(self, data: Mapping[str, Any]) -> None:
        """The one JSON object, if it was asked for."""
        if self.json == STDOUT:
            self.print(dumps(data))
        elif self.json_file is not None:
            write_json(self.json_file, data)


def width_of(stream: TextIO) -> int | None:
    """The columns of a terminal, or what COLUMNS says; None if neither limits a line."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError, AttributeError):
        return None


def note(text: str) -> None:
    """Progress and warnings, on stderr, without what is secret in a URL that the command was given;
    if the stream is closed, the command goes on.
    """
    with suppress(OSError, ValueError):
        click.echo(hidden(text), err=True, color=None if wants_color() else False)


_urls: list[str] = []


@contextmanager
def without_urls(urls: Sequence[str]) -> Iterator[None]:
    """Inside, notes and the traces of threads hide what is secret in these URLs."""
    before, threads = [*_urls], threading.excepthook
    _urls[:] = urls
    if urls:
        threading.excepthook = _hide_in_trace
    try:
        yield
    finally:
        _urls[:], threading.excepthook = before, threads


def hidden(text: str) -> str:
    """A text without what is secret in the URLs of `without_urls`."""
    for url in _urls:
        text = without_secrets(text, url, user=False)
    return text


def _hide_in_trace(raised: threading.ExceptHookArgs) -> None:
    trace = traceback.format_exception(raised.exc_type, raised.exc_value, raised.exc_traceback)
    note("".join(trace))


def wants_color() -> bool:
    """As no-color.org has it; click itself looks whether the stream is a terminal. A dumb one, such
    as an editor's, shows escape codes as they are.
    """
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def bold(text: str) -> str:
    return click.style(text, bold=True)


def dumps(data: Mapping[str, Any]) -> str:
    """ASCII only, so that no locale can spoil it."""
    return json.dumps(data, allow_nan=False)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Raises OSError if it cannot be written, ForeignFile if another file is already there."""
    require_replaceable_json(path)
    write_whole(path, (json.dumps(data, indent=1, allow_nan=False) + "\n").encode())


def require_replaceable_json(path: Path) -> None:
    require_replaceable(path, "JSON", _is_own_json)


def _is_own_json(content: bytes) -> bool:
    """Whether these bytes are what `plantune bench` writes."""
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and {"environment", "workload", "rows"} <= set(data)


@contextmanager
def any_locale() -> Iterator[None]:
    """Text that the locale cannot show, such as an odd path, is escaped instead of an error."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    yield


@contextmanager
def shown_warnings() -> Iterator[None]:
    """plantune's own warnings as single lines on stderr, the libraries' not at all."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", category=PlantuneWarning)
        warnings.showwarning = _show
        yield


def _show(message: Warning | str, *where: Any, **how: Any) -> None:
    note(f"{click.style('warning:', fg='yellow')} {message}")


def close_quietly() -> None:
    """The reader of stdout is gone: what Python still buffers for it is discarded."""
    with suppress(OSError, ValueError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, results().fileno())
        os.close(devnull)
