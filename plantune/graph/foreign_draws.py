"""Random numbers that are no tensors: a trace would keep one draw of them for all calls."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LEAST_S = 0.01
# Where numpy's generator is before its first draw, as made and as seeded.
UNUSED = (623, 624)


@contextmanager
def without_foreign_draws(refuse: Callable[[str], Exception]) -> Iterator[None]:
    """Raises what `refuse` makes if the code inside drew from Python's random numbers or numpy's,
    such as to leave out a layer.

    Other threads draw from the same generators. Whether one is at it is seen while this one waits:
    then it is not known who drew, and nothing is raised.
    """
    before, began_s = _states(), time.perf_counter()
    yield
    for name, state in _states().items():
        if state != before[name] and _stands(name, time.perf_counter() - began_s):
            raise refuse(f"a forward that draws from {name}, which is no torch.rand,")


def _stands(name: str, seconds: float) -> bool:
    """Whether nobody draws meanwhile."""
    if threading.active_count() == 1:
        return True
    state = _states()[name]
    time.sleep(max(seconds, LEAST_S))
    return bool(_states()[name] == state)


def _states() -> dict[str, Any]:
    return {"Python's random": random.getstate(), "numpy.random": _of_numpy()}


def _of_numpy() -> tuple[Any, ...] | None:
    """None where it was never drawn from: to load it takes long, and the forward may be first."""
    module = sys.modules.get("numpy.random")
    if module is None:
        return None
    inner = module.get_state(legacy=False)["state"]
    return None if inner.get("pos") in UNUSED else tuple(map(_plain, inner.values()))


def _plain(part: Any) -> Any:
    return part.tobytes() if hasattr(part, "tobytes") else part
