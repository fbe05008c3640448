"""Remembers which plans were proved right in which environment, and which guesses lost to the
framework's kernels, as small files in the cache folder.

A plan's own claims do not count: only what a search, `verify` or a first call found here.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from plantune.canonical import digest
from plantune.errors import ForeignFile
from plantune.files import read_regular, write_whole
from plantune.machine import Environment
from plantune.paths import cache_folder
from plantune.plan import Plan

SIZE_LIMIT_BYTES = 1024


def is_proved(plan: Plan, environment: Environment) -> bool:
    """Whether this very plan was proved in this very environment."""
    try:
        return read_regular(_place(plan, environment), SIZE_LIMIT_BYTES) == _text(plan, environment)
    except (OSError, ForeignFile):
        return False


def remember_proof(plan: Plan, environment: Environment) -> None:
    """If nothing can be written, the plan is proved again in the next process."""
    place = _place(plan, environment)
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, _text(plan, environment))


def is_known_slower(plan: Plan, environment: Environment) -> bool | None:
    """Whether this guess lost to the framework's kernels in this environment; None if nobody has
    looked.
    """
    place = _place(plan, environment, "race")
    for slower in (True, False):
        with suppress(OSError, ForeignFile):
            if read_regular(place, SIZE_LIMIT_BYTES) == _raced(plan, environment, slower):
                return slower
    return None


def remember_race(plan: Plan, environment: Environment, *, slower: bool) -> None:
    """If nothing can be written, they race again in the next process."""
    place = _place(plan, environment, "race")
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, _raced(plan, environment, slower))


def _raced(plan: Plan, environment: Environment, slower: bool) -> bytes:
    return _text(plan, environment) + (b"slower\n" if slower else b"not slower\n")


def _place(plan: Plan, environment: Environment, *what: str) -> Path:
    return cache_folder() / "proofs" / digest([plan.digest, environment.key, *what])


def _text(plan: Plan, environment: Environment) -> bytes:
    return f"plan {plan.digest}\nenvironment {environment.key}\n".encode()
