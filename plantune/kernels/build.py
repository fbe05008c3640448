"""Builds kernels, each once in a process: equal steps with equal candidates share it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from plantune.kernels.family import Candidate
from plantune.kernels.resolved import ResolvedStep
from plantune.space.arch import Arch

Key = tuple[str, Candidate, str]

_built: dict[Key, Any] = {}
_building: dict[Key, threading.Lock] = {}
_lock = threading.Lock()


def build(chosen: ResolvedStep, arch: Arch) -> Any:
    """The compiled kernel of a candidate, None if its family compiles nothing."""
    key = (chosen.step.signature, chosen.candidate, arch.name)
    with _lock:
        own = _building.setdefault(key, threading.Lock())
    with own:
        if key not in _built:
            made = chosen.family.build(chosen.parts, chosen.config, arch)
            if made is not None:  # else there is nothing to share, and steps may be without end
                _built[key] = made
        _building.pop(key, None)
        return _built.get(key)


def build_all(wanted: Iterable[ResolvedStep], arch: Arch) -> None:
    """Builds those that are compiled from a source at once, each by a compiler process of its own.

    Raises what the first failing one raised.
    """
    compiled = [
        each for each in wanted if each.family.source(each.parts, each.config, arch) is not None
    ]
    if len(compiled) > 1:
        started: list[Future[Any]] = []
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            # Once the main thread has ended they take no work; who needs a kernel builds it alone.
            with suppress(RuntimeError):
                started.extend(threads.submit(build, each, arch) for each in compiled)
            for done in started:
                done.result()
