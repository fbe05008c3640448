"""The memory of a program: one arena for what lives during a pass, own storage for constants."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor

from plantune.graph.types import TensorType
from plantune.kernels.family import Values
from plantune.layouts import view_bytes
from plantune.runtime.liveness import Liveness
from plantune.runtime.memory_plan import plan_memory
from plantune.runtime.schedule import Launch, Schedule


def allocate(
    schedule: Schedule, live: Liveness, device: torch.device, apart: Container[str] = ()
) -> Values:
    """A tensor for every value and workspace that is written into memory of the program's own.

    Those `apart` share their memory with no other value.
    """

    def fresh(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=device)

    plan = plan_memory(live.buffers)
    arena = fresh(plan.size_bytes)
    values: Values = {}
    for launch in schedule.launches:
        for name, type_, layout in _written(launch, schedule):
            if name in plan.starts and name not in apart:
                values[name] = view_bytes(arena, plan.starts[name], type_, layout)
            else:
                values[name] = view_bytes(fresh(type_.size_bytes), 0, type_, layout)
        if launch.workspace_bytes:
            start = plan.starts.get(launch.workspace)
            memory, start = (fresh(launch.workspace_bytes), 0) if start is None else (arena, start)
            values[launch.workspace] = memory[start : start + launch.workspace_bytes]
    return values


def _written(launch: Launch, schedule: Schedule) -> list[tuple[str, TensorType, str]]:
    """What a launch writes into given memory: name, type, layout."""
    types, layouts = schedule.graph.types, schedule.layouts
    elsewhere = launch.adopts | launch.aliases.keys()
    return [
        *((copy.result, types[copy.source], copy.layout) for copy in launch.conversions),
        *(
            (name, type_, layouts[name])
            for name, type_ in launch.step.outputs
            if name not in elsewhere
        ),
    ]
