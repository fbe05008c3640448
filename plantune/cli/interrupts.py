"""SIGINT, SIGTERM and a closed terminal as one: KeyboardInterrupt, at a point or soon after."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """`check` raises again what code that runs at odd times, such as a finalizer, swallowed."""

    def __init__(self) -> None:
        self.requested = False

    def check(self) -> None:
        if self.requested:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        raise KeyboardInterrupt


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """The signals raise KeyboardInterrupt inside; what nohup ignores stays ignored."""
    state = Interrupts()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    handled = [number for number in SIGNALS if before[number] is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, state._handle)
    earlier = sys.unraisablehook

    def report(swallowed: UnraisableHookArgs) -> None:
        """Python would print the traceback of an interrupt that came amid a finalizer."""
        if swallowed.exc_type is not KeyboardInterrupt:
            earlier(swallowed)

    sys.unraisablehook = report
    try:
        yield state
    finally:
        sys.unraisablehook = earlier
        for number in handled:
            signal.signal(number, before[number] or signal.SIG_DFL)


@contextmanager
def undisturbed() -> Iterator[None]:
    """The signals are ignored inside: for saving what there is."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
