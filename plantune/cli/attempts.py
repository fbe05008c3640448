"""What follows a long measurement: one error there ends none of the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

from plantune.cli.console import note
from plantune.cli.exit_codes import DONE, EXPECTED, exit_code

T = TypeVar("T")


class Attempts:
    """Runs what may fail, tells each error at once, and keeps the exit code of the first."""

    def __init__(self) -> None:
        self.code = DONE

    def of(self, work: Callable[[], T]) -> T | None:
        """What it returns, None after an expected error."""
        try:
            return work()
        except EXPECTED as error:
            note(f"{click.style('error:', fg='red')} {error}")
            self.code = self.code or exit_code(error)
            return None
