"""The network of a race: its module with random weights, the exact one, and inputs for it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from plantune.graph import Graph, TensorType
from plantune.graph.arguments import Arguments
from plantune.graph.extract import extract
from plantune.graph.tape import Tape, unpacked
from plantune.measure.rebuilt import rebuilt
from plantune.problem import Problem
from plantune.runtime.draws import drawn_inputs
from plantune.workload import Workload

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Raced:
    """The network of a race: the one of the tape, else the reference network that is named. In
    training a call is both passes, or with `steps` a whole step with AdamW.
    """

    problem: Problem
    tape: Tape | None = None
    steps: bool = False


class Subject:
    """A network on a device."""

    def __init__(self, raced: Raced, device: torch.device) -> None:
        problem, tape = raced.problem, raced.tape
        self._tape, self._device = tape, device
        self._trains = problem.mode == "train"
        self.types: tuple[TensorType, ...] = tuple(type_ for _, type_ in problem.tensors)
        made = Workload.of(problem).module() if tape is None else rebuilt(tape, device)
        self.module = _randomised(made.train(self._trains)).to(device)

    @property
    def arguments(self) -> Arguments:
        return Arguments(self.types, examples=self._examples)

    @property
    def draws(self) -> bool:
        """Whether two calls of it differ."""
        return self._tape is not None and self._tape.draws

    def exact(self) -> nn.Module:
        """The network in float64."""
        if self._tape is None:
            return copy.deepcopy(self.module).double()
        exact = rebuilt(self._tape, self._device, torch.float64).double().to(self._device)
        exact.load_state_dict(self.module.state_dict())
        return exact.train(self._trains)

    def inputs(self, random: torch.Generator) -> Inputs:
        """Of a call, where `random` draws them."""
        if all(type_.is_float for type_ in self.types):
            return tuple(_normal(type_, random) for type_ in self.types)
        return tuple(drawn_inputs(self._graph, self._examples, random))

    @cached_property
    def _graph(self) -> Graph:
        return extract(self.module, *self.types, fold=False)

    @cached_property
    def _examples(self) -> tuple[Tensor | None, ...]:
        held = () if self._tape is None else self._tape.examples
        return tuple(
            None if text is None else unpacked(text, type_)
            for text, type_ in zip(held, self.types, strict=False)
        )


def _normal(type_: TensorType, random: torch.Generator) -> Tensor:
    return torch.randn(type_.shape, generator=random, dtype=type_.torch_dtype, device=random.device)


def _randomised(module: nn.Module) -> nn.Module:
    """No weight is 0 or 1 any more: Fixup's first values would hide a mistake."""
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.is_floating_point():
                continue
            if parameter.dim() > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.uniform_(0.5, 1.0)
    return module
