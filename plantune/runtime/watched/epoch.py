"""Counts changes of dicts as they are made, by the dict watchers of CPython 3.12 and later."""

from __future__ import annotations

import atexit
import ctypes
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

# Moves before each change of a watched dict.
count = 0


def _moves(event: int, changing: int, key: int, value: int) -> int:
    # Nothing is called here: no other thread may look between this and the change that follows it.
    global count  # noqa: PLW0603
    count += 1
    return 0


_Callback = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
)
_callback = _Callback(_moves)


def watch(dicts: Iterable[dict[str, Any]]) -> bool:
    """Has `count` move with each change of these dicts; False if this Python cannot do that."""
    watcher = _watcher()
    if watcher is None:
        return False
    for changing in dicts:
        ctypes.pythonapi.PyDict_Watch(watcher, ctypes.py_object(changing))
    return True


@cache
def _watcher() -> int | None:
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    try:
        watcher = int(ctypes.pythonapi.PyDict_AddWatcher(_callback))
    except (AttributeError, RuntimeError):  # An older Python, or all watchers are taken.
        return None
    # Dicts that outlive this module must not call it.
    atexit.register(ctypes.pythonapi.PyDict_ClearWatcher, watcher)
    return watcher
