"""A plan that plantune ships, for a module to try."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plantune.devices.host import give_way
from plantune.errors import PlantuneError
from plantune.kernels.build import build
from plantune.plans.checked_plan import CheckedPlan

if TYPE_CHECKING:
    from plantune.runtime.captured.program_pool import ProgramPool


@dataclass(frozen=True)
class Shipped:
    """A plan to try: `check` gives it if it fits the layers, `prove` its instances once it computed
    the network here, or says why it cannot run; `report` hears of that.
    """

    check: Callable[[], CheckedPlan]
    prove: Callable[[], ProgramPool | str]
    report: Callable[[str], None]

    def build(self) -> None:
        """Compiles its kernels, one after the other, for the cache of this process."""
        with suppress(OSError):
            give_way()
        # What fails is met again by the proof.
        with suppress(PlantuneError):
            checked = self.check()
            for chosen in checked.of_pass:
                build(chosen, checked.space.arch)
