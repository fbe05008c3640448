"""Stdout for results alone: what else writes there, from Python, C or a process that was started,
reaches stderr.

A network's code runs in the commands' own process, and may print at any time until its end.
"""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TextIO

from plantune.base.files import moved_stdout

STDOUT, STDERR = 1, 2


@dataclass
class _Results:
    """The stream of results, None where it is `sys.stdout`; whether it is the process's own. Only
    inside of `own_stdout` it is taken: where a program calls a command, stdout is that program's.
    """

    stream: TextIO | None = None
    is_own: bool = False
    may_take: bool = False


_results = _Results()


def results() -> TextIO:
    """The stream that results go to."""
    return _results.stream or sys.stdout


def take_stdout() -> None:
    """From now on only what is written to `results` reaches stdout."""
    before = sys.stdout
    if not _results.may_take or before is None or before is sys.stderr:  # closed, or taken already
        return
    if _results.stream is None:
        _results.is_own = _descriptor_of(before) == STDOUT
        _results.stream = _moved(before) if _results.is_own else before
    if sys.stderr is not None:
        sys.stdout = sys.stderr


@contextmanager
def own_stdout() -> Iterator[None]:
    """Around one command. A process's own stdout is never given back: what C has buffered, and what
    is registered for the end, comes after all.
    """
    if _results.stream is not None:  # a second command in this process
        sys.stdout = _results.stream
    _results.may_take = True
    try:
        yield
    finally:
        _results.may_take = False
        if _results.stream is not None and not _results.is_own:
            sys.stdout, _results.stream = _results.stream, None


def _moved(stream: TextIO) -> TextIO:
    """The same place with another descriptor; the one that it had leads to stderr."""
    stream.flush()
    own = os.dup(STDOUT)
    elsewhere = os.open(os.devnull, os.O_WRONLY) if sys.stderr is None else os.dup(STDERR)
    os.dup2(elsewhere, STDOUT)
    os.close(elsewhere)
    moved_stdout(own)
    # As click itself does: what says that it knows ASCII alone was set up by nobody.
    ascii_only = codecs.lookup(stream.encoding).name == "ascii"
    encoding = "utf-8" if ascii_only else stream.encoding
    return open(own, "w", encoding=encoding, errors="backslashreplace")


def _descriptor_of(stream: TextIO) -> int | None:
    with suppress(OSError, ValueError, AttributeError):
        return stream.fileno()
    return None
