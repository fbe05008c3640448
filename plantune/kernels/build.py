"""Builds kernels, each once in a process: equal steps with equal candidates share it."""

from __future__ import annotations

import threading
from typing import Any

from plantune.graph.step import Step
from plantune.kernels.family import Candidate
from plantune.kernels.registry import family_named
from plantune.space.arch import Arch

_built: dict[tuple[str, Candidate, str], Any] = {}
_lock = threading.Lock()


def build(step: Step, candidate: Candidate, arch: Arch) -> Any:
    """The compiled kernel of a candidate, None where its family compiles nothing."""
    key = (step.signature, candidate, arch.name)
    with _lock:
        if key not in _built:
            family = family_named(candidate.family)
            _built[key] = family.build(step, candidate.config, arch)
        return _built[key]
