"""A program that spoils whatever memory it gave free, with branches at odd times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from plantune.graph.graph import Graph
from plantune.plans.checked_plan import check_plan
from plantune.plans.plan import Plan
from plantune.runtime.program import memory_plan as memory_module
from plantune.runtime.program import program as program_module
from plantune.runtime.program.branches import Branch, Enqueue
from plantune.runtime.program.memory_plan import Liveness
from plantune.runtime.program.program import Program
from plantune.runtime.program.schedule import Schedule, ScheduledStep
from plantune.space.search_space import SearchSpace


class EarlyLanes:
    """Branches run as soon as they may, before the launches beside them. Only in a `Poisoned`."""

    halved: frozenset[int] = frozenset()  # no family for CPUs has second halves

    def __init__(self, branches: Iterable[Branch], device: torch.device) -> None:
        self.branches = tuple(branches)
        self._when = {branch.launch: self.when(branch) for branch in self.branches}

    @staticmethod
    def when(branch: Branch) -> int:
        return branch.beside[0]

    def ordered(
        self,
        calls: Sequence[list[Enqueue]],
        places: range,
        rests: Mapping[int, Enqueue],
        marks: Mapping[int, Enqueue] | None = None,
    ) -> list[Enqueue]:
        """Nobody waits for the `marks` of a pass in one process."""
        order = []
        for place in places:
            spoil, *own, drop = calls[place]
            order.append(spoil)
            for launch in places:
                if self._when.get(launch) == place:
                    order += calls[launch][1:-1]
            order += [*([] if place in self._when else own), drop]
        return order


class LateLanes(EarlyLanes):
    """Branches run as late as they may, behind all but one of the launches beside them."""

    @staticmethod
    def when(branch: Branch) -> int:
        return branch.beside[-1]


LANES = (EarlyLanes, LateLanes)


class PoisonedProgram(Program):
    """Spoils each buffer as soon as its liveness calls it free, and all of them before a pass."""

    def __init__(
        self, graph: Graph, plan: Plan, space: SearchSpace, lanes: type[EarlyLanes] | None = None
    ) -> None:
        self._when = 0
        self._live = Liveness((), (), ())
        if lanes is not None:
            plan = replace(plan, branches=True)
        checked = check_plan(plan, graph, space)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(program_module, "liveness", self._recorded)
            if lanes is not None:
                patch.setattr(program_module, "Lanes", lanes)
            super().__init__(checked)

    def _recorded(self, schedule: Schedule, branches: Iterable[Branch], *, seeds: bool) -> Liveness:
        self._live = memory_module.liveness(schedule, branches, seeds=seeds)
        return self._live

    def _calls(self, launch: ScheduledStep, drops: Sequence[str] = ()) -> list[Callable[[], None]]:
        calls = super()._calls(launch)
        if launch.step.phase == "refresh":
            return calls
        when, self._when = self._when, self._when + 1
        free = [b.name for b in self._live.buffers if when == 0 or b.last == when - 1]

        def spoil() -> None:
            for name in free:
                value = self.values[name]
                value.fill_(torch.nan if value.is_floating_point() else 0)

        def drop() -> None:
            for name in drops:
                del self.values[name]

        return [spoil, *calls, drop]
