"""Watches random numbers of Python and numpy, which a trace would freeze to one draw, and code that
seeds torch's own generator.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from plantune.graph.tracing.side_effects.objects import HeldObject, plain

SETTERS = ("manual_seed", "seed", "set_state")
# Where Dynamo keeps the generator; its wrapper of manual_seed() stands elsewhere.
DYNAMO = tuple(
    str(Path(torch.__file__).parent / "_dynamo" / name) for name in ("convert_frame.py", "utils.py")
)
# Between what sets the generator and who asks for it.
CALLERS = 5
# Where numpy's generator is before its first draw, as made and as seeded.
UNUSED = (623, 624)


def generators() -> list[HeldObject]:
    """Python's and numpy's own. What draws from them is refused, and they go on from there."""
    looks = {"Python's random": random.getstate, "numpy.random": _of_numpy}
    return [
        HeldObject(f"{name}, which is no torch.rand,", True, look, _stays, look())
        for name, look in looks.items()
    ]


def _stays(before: Any) -> None:
    """Other threads have drawn from it, too."""


def _of_numpy() -> tuple[Any, ...] | None:
    """None if nothing was drawn yet. Does not import numpy, which takes long."""
    module = sys.modules.get("numpy.random")
    if module is None:
        return None
    inner = module.get_state(legacy=False)["state"]
    return None if inner.get("pos") in UNUSED else tuple(map(plain, inner.values()))


@contextmanager
def unset(refuse: Callable[[str], Exception]) -> Iterator[None]:
    """Inside, functions of torch.random that set the generator raise in this thread."""
    place: Any = torch.random
    own = place.default_generator
    place.default_generator = _Unset(own, refuse)
    try:
        yield
    finally:
        place.default_generator = own


class _Unset:
    """A generator of torch's, all of which other threads may use."""

    def __init__(self, generator: Any, refuse: Callable[[str], Exception]) -> None:
        self._generator, self._refuse = generator, refuse
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        here = threading.get_ident() == self._thread
        if name in SETTERS and here and not _is_dynamos(sys._getframe(1)):
            raise self._refuse("a forward that sets torch's random numbers, as by manual_seed(),")
        return getattr(self._generator, name)


def _is_dynamos(frame: FrameType | None) -> bool:
    """Whether Dynamo calls, which puts back what it found: a forward may call what it compiles."""
    for _ in range(CALLERS):
        if frame is not None and frame.f_code.co_filename.startswith(DYNAMO):
            return True
        frame = None if frame is None else frame.f_back
    return False
