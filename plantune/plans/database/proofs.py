"""Remembers which plans were proved right in which environment, and which guesses lost to the
framework's kernels, as small files in the cache folder.

A plan's own claims do not count, only what a search, `verify` or a first call showed here.
"""

from __future__ import annotations

from contextlib import suppress

from plantune.base.atomic_files import SHARED, write_cached
from plantune.base.canonical import digest
from plantune.base.files import read_regular
from plantune.base.paths import cache_file
from plantune.devices.cuda.flags import float32_precisions
from plantune.devices.machine import Environment
from plantune.errors import ForeignFile
from plantune.plans.plan import Plan

SIZE_LIMIT_BYTES = 1024
RACED = {True: b"slower\n", False: b"not slower\n"}


def is_proved(plan: Plan, environment: Environment) -> bool:
    """Whether this very plan was proved in this very environment."""
    return _Note(plan, environment).holds()


def remember_proof(plan: Plan, environment: Environment) -> None:
    """If nothing can be written, the plan is proved again in the next process."""
    _Note(plan, environment).write()


def is_known_slower(plan: Plan, environment: Environment) -> bool | None:
    """Whether this guess lost to the framework's kernels in this environment; None if nobody has
    looked.
    """
    note = _Note(plan, environment, "race")
    return next((slower for slower in (True, False) if note.holds(RACED[slower])), None)


def remember_race(plan: Plan, environment: Environment, *, slower: bool) -> None:
    """If nothing can be written, they race again in the next process."""
    _Note(plan, environment, "race").write(RACED[slower])


class _Note:
    """The file that says something of a plan in an environment."""

    def __init__(self, plan: Plan, environment: Environment, *what: str) -> None:
        # A plan of float32 that does not say for which settings may run under any.
        problem = plan.problem
        is_known = problem.precisions or problem.arch == "cpu" or problem.dtype != "float32"
        settings = () if is_known else float32_precisions()
        name = digest([plan.digest, environment.key, *what, *settings])
        self._names = ("proofs", name)
        self.head = f"plan {plan.digest}\nenvironment {environment.key}\n".encode()

    def holds(self, text: bytes = b"") -> bool:
        try:
            return read_regular(cache_file(*self._names), SIZE_LIMIT_BYTES) == self.head + text
        except ForeignFile:
            return False

    def write(self, text: bytes = b"") -> None:
        with suppress(OSError):
            place = cache_file(*self._names, to_write=True)
            place.parent.mkdir(parents=True, exist_ok=True)
            write_cached(place, self.head + text, SHARED)
