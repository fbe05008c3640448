"""Remembers which plans were proved right in which environment, as small files in the cache folder.

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


def _place(plan: Plan, environment: Environment) -> Path:
    return cache_folder() / "proofs" / digest([plan.digest, environment.key])


def _text(plan: Plan, environment: Environment) -> bytes:
    return f"plan {plan.digest}\nenvironment {environment.key}\n".encode()
