"""What no trace sees a forward move: random numbers that are no tensors, of which it would keep one
draw for all calls, objects that the module holds, and what sets torch's own generator.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from plantune.graph.tracing.held_objects import held_objects

SETTERS = ("manual_seed", "seed", "set_state")
# Where Dynamo keeps the generator; its wrapper of manual_seed() stands elsewhere.
DYNAMO = tuple(
    str(Path(torch.__file__).parent / "_dynamo" / name) for name in ("convert_frame.py", "utils.py")
)
# Between what sets the generator and who asks for it.
CALLERS = 5
LEAST_S = 0.01
# Where numpy's generator is before its first draw, as made and as seeded.
UNUSED = (623, 624)


@contextmanager
def without_foreign_draws(module: nn.Module, refuse: Callable[[str], Exception]) -> Iterator[None]:
    """Raises what `refuse` makes if the code inside drew from Python's random numbers or numpy's,
    such as to leave out a layer, or sets where torch's go on, or moves what the module holds, which
    is put back.

    Other threads draw from the same generators. Whether one is at it is seen while this one waits:
    then it is not known who drew, and nothing is raised.
    """
    held = held_objects(module)
    before, began_s = {name: look() for name, look in LOOKS.items()}, time.perf_counter()
    with _unset(refuse):
        yield
    seconds = time.perf_counter() - began_s
    for name, look in LOOKS.items():
        if look() != before[name] and _stands(look, seconds):
            raise refuse(f"a forward that draws from {name}, which is no torch.rand,")
    for each in held:
        if each.has_moved and _stands(each.look, seconds):
            each.restore()
            raise refuse(f"a forward that {'draws from' if each.draws else 'changes'} {each.path}")


@contextmanager
def _unset(refuse: Callable[[str], Exception]) -> Iterator[None]:
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


def _stands(look: Callable[[], Any], seconds: float) -> bool:
    """Whether nobody moves it meanwhile."""
    if threading.active_count() == 1:
        return True
    state = look()
    time.sleep(max(seconds, LEAST_S))
    return bool(look() == state)


def _of_numpy() -> tuple[Any, ...] | None:
    """None where it was never drawn from: to load it takes long, and the forward may be first."""
    module = sys.modules.get("numpy.random")
    if module is None:
        return None
    inner = module.get_state(legacy=False)["state"]
    return None if inner.get("pos") in UNUSED else tuple(map(_plain, inner.values()))


def _plain(part: Any) -> Any:
    return part.tobytes() if hasattr(part, "tobytes") else part


# How Python's and numpy's own generators stand.
LOOKS: dict[str, Callable[[], Any]] = {
    "Python's random": random.getstate,
    "numpy.random": _of_numpy,
}
