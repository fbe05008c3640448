"""How a step's kernel gets its memory: the same in a program, and alone where it is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plantune.graph.layouts import view_bytes
from plantune.kernels.cpu.huge_pages import in_huge_pages
from plantune.kernels.family import Binding, Frame, Values
from plantune.runtime.program.schedule import ScheduledStep

# Bytes for a value or workspace of that name and size: memory, and where in it they start.
Take = Callable[[str, int], tuple[Tensor, int]]


def fresh(size_bytes: int, device: torch.device) -> Tensor:
    """Bytes of their own."""
    return in_huge_pages(torch.empty(size_bytes, dtype=torch.uint8, device=device))


def made_for(launch: ScheduledStep, take: Take) -> Values:
    """A tensor for everything that a launch writes into given memory, its workspace included."""
    values = {
        name: view_bytes(*take(name, type_.size_bytes), type_, layout)
        for name, type_, layout in launch.written
    }
    if launch.workspace_bytes:
        memory, start = take(launch.workspace, launch.workspace_bytes)
        values[launch.workspace] = memory[start : start + launch.workspace_bytes]
    return values


def bind(launch: ScheduledStep, values: Values, built: Any, device: torch.device) -> Binding:
    """The kernel of a launch, tied to the memory in `values`."""
    workspace = values.get(launch.workspace)
    frame = Frame(values, workspace, built, device, launch.loose, launch.aligned)
    return launch.family.bind(launch.parts, launch.candidate.config, frame)
