"""An interrupt that comes amid a finalizer, which Python swallows."""

from __future__ import annotations

import sys

import pytest

from plantune.cli.interrupts import interrupts


class Finalized:
    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __del__(self) -> None:
        raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_no_traceback_of_it_is_printed(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    told: list[type[BaseException]] = []

    def hook(swallowed: sys.UnraisableHookArgs) -> None:
        told.append(swallowed.exc_type)

    monkeypatch.setattr(sys, "unraisablehook", hook)
    with interrupts():
        Finalized(error)
    assert told == [each for each in (error,) if each is not KeyboardInterrupt]
    assert sys.unraisablehook is hook
