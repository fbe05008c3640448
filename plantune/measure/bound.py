"""A step's kernel bound to memory as a program would give it, ready to be timed."""

from __future__ import annotations

import torch
from torch import Tensor

from plantune.graph.step import Step
from plantune.graph.types import TensorType
from plantune.kernels.build import build
from plantune.kernels.family import Candidate, Frame, Values
from plantune.kernels.registry import family_named
from plantune.measure.inputs import draw_inputs
from plantune.memory import view_bytes
from plantune.space.arch import Arch

CPU_STREAM = 0


class BoundStep:
    """One candidate with random inputs, prepared weights, and memory of its own.

    An image that the kernel takes in any layout comes in the one that it makes: a plan that mixes
    layouts pays for its conversions in the whole program.
    """

    def __init__(self, step: Step, candidate: Candidate, arch: Arch, seed: int = 0) -> None:
        family, config = family_named(candidate.family), candidate.config
        layouts = family.layouts(step, config)
        elsewhere = {*family.aliases(step, config), *family.adopts(step, config)}
        made = [layouts.get(name, "nchw") for name, t in step.outputs if len(t.shape) == 4]
        self._made_anew = tuple(elsewhere)
        self._values: Values = {
            name: _empty(type_, layouts.get(name, "nchw"))
            for name, type_ in step.outputs
            if name not in elsewhere
        }
        for name, data in draw_inputs(step, torch.Generator().manual_seed(seed)).items():
            image = len(step.types[name].shape) == 4 and name not in step.constants
            layout = layouts.get(name, made[0] if image and made else "nchw")
            self._values[name] = _empty(step.types[name], layout).copy_(data)
        size = family.workspace_bytes(step, config)
        workspace = torch.empty(size, dtype=torch.uint8) if size else None
        frame = Frame(self._values, workspace, build(step, candidate, arch))
        binding = family.bind(step, config, frame)
        if binding.refresh is not None:
            binding.refresh()
        self._launch = binding.launch

    def launch(self) -> None:
        """Runs the step once; what it made in fresh memory is dropped, as in a program."""
        self._launch(CPU_STREAM)
        for name in self._made_anew:
            del self._values[name]


def _empty(type_: TensorType, layout: str) -> Tensor:
    return view_bytes(torch.empty(type_.size_bytes, dtype=torch.uint8), 0, type_, layout)
