"""The seconds of searching that a module may take, for all of its pieces together."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from plantune.base.atomic_files import SHARED, write_cached
from plantune.base.canonical import digest
from plantune.base.files import read_regular
from plantune.base.paths import cache_file
from plantune.base.warning import warn
from plantune.devices.machine import environment_of
from plantune.errors import ForeignFile, PlantuneError, PlantuneWarning
from plantune.kernels.registry import estimate_us
from plantune.runtime.captured.program_pool import ProgramPool, device_of
from plantune.runtime.module import TunedModule

SIZE_LIMIT_BYTES = 64


def spent_s(key: str) -> float:
    """The seconds that all processes together have spent on it."""
    with suppress(ForeignFile, ValueError):
        return float(read_regular(_place(key), SIZE_LIMIT_BYTES))
    return 0.0


def remember(key: str, seconds: float) -> None:
    """If nothing can be written, the next process searches again."""
    with suppress(OSError):
        place = _place(key, to_write=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        write_cached(place, f"{seconds:.1f}".encode(), SHARED)


@contextmanager
def alone_with(key: str) -> Iterator[None]:
    """One process at a time, where files can be locked."""
    with ExitStack() as stack:
        with suppress(OSError):
            place = _place(key, to_write=True)
            place.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(place.with_suffix(".lock").open("wb"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _place(key: str, *, to_write: bool = False) -> Path:
    return cache_file("searched", key, to_write=to_write)


# A shorter search would find nothing.
LEAST_S = 2.0
# Searches for a plan of what a pool of this module runs, for so many seconds, and keeps it.
Search = Callable[[TunedModule, ProgramPool, float], None]


class SearchEnded(PlantuneWarning):
    """A search for a piece failed; it runs as before."""


@dataclass(frozen=True)
class _Waiting:
    tuned: TunedModule
    pool: ProgramPool
    forget: Callable[[], object]


class Allowance:
    """Pieces join with their first call. When one of them is called again, all of the module's have
    run, and what is left is spent: each gets a part by the time that it takes.
    """

    def __init__(self, seconds: float, search: Search) -> None:
        self.seconds = seconds
        self.waits = False
        self._search = search
        self._waiting: list[tuple[TunedModule, Callable[[], object]]] = []
        self._keys: set[str] = set()
        self._lock = threading.Lock()

    def join(self, tuned: TunedModule, forget: Callable[[], object]) -> None:
        """`forget` has it made again, from the plan that there is then."""
        if self.seconds:
            self._waiting.append((tuned, forget))
            self.waits = True

    def spend(self) -> None:
        """Searches for what waits, and first for what no process has searched for yet."""
        with self._lock:
            waiting, self._waiting, self.waits = self._waiting, [], False
            found = {_key(p): _Waiting(t, p, forget) for t, forget in waiting for p in t.pools()}
            self._keys |= found.keys()
            left_s = self.seconds - sum(map(spent_s, self._keys))
            new = [key for key in found if not spent_s(key)] or list(found)
            times = {key: _time_us(found[key].pool) for key in new}
            for key, part in _parts(times):
                seconds = part * left_s
                if seconds >= LEAST_S:
                    self._search_for(key, found[key], seconds)

    def _search_for(self, key: str, waiting: _Waiting, seconds: float) -> None:
        before = spent_s(key)
        with alone_with(key):
            if spent_s(key) == before:  # else another process has done it
                try:
                    self._search(waiting.tuned, waiting.pool, seconds)
                except PlantuneError as error:
                    text = f"{waiting.pool.plan.problem}: the search ended early: {error}"
                    warn(text, SearchEnded)
                remember(key, before + seconds)
        waiting.forget()


def _parts(times: dict[str, float]) -> list[tuple[str, float]]:
    """What each takes of the whole, the longest first."""
    whole = sum(times.values()) or 1.0
    return [(key, times[key] / whole) for key in sorted(times, key=lambda key: -times[key])]


def _key(pool: ProgramPool) -> str:
    device = device_of(pool.owned.module, pool.owned.otherwise)
    problem, environment = pool.plan.problem.key, environment_of(device)
    return digest([asdict(problem), environment.key])


def _time_us(pool: ProgramPool) -> float:
    """A guess at the time of a pass as it runs now."""
    arch = pool.space.arch
    return sum(estimate_us(each.step, each.candidate, arch) for each in pool.checked.steps)
