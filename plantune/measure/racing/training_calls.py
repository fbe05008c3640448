"""What one call of a race in training is: both passes, or a whole step with AdamW."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plantune.measure.racing.call_parts import START, Mark, unmarked
from plantune.measure.racing.routes import Run
from plantune.measure.subject import Inputs
from plantune.runtime.module import TunedModule
from plantune.training.step import TrainStep

Marked = Callable[[Mark], object]
CallOf = Callable[[Sequence[Inputs]], Any]  # Runnable in inference, else that and Marked
# So small that the weights stay what they are, however long a race takes.
RATE = 1e-7


def passes_of(
    run: Run, module: nn.Module, dys: Sequence[Tensor], renew: Callable[[], object]
) -> CallOf:
    """Forward and backward, with the gradients of all parameters made anew."""
    parameters = [p for p in module.parameters() if p.requires_grad]

    def call_of(images: Sequence[Inputs]) -> Marked:
        turns = cycle(images)

        def call(mark: Mark = unmarked) -> None:
            renew()
            for parameter in parameters:
                parameter.grad = None
            mark(START)
            made = _floats(run(*next(turns)))
            mark("forward")
            torch.autograd.backward(made, dys)
            mark("backward")

        return call

    return call_of


def steps_of(run: Run, module: nn.Module, dys: Sequence[Tensor]) -> CallOf:
    """The step as one writes it for torch, with its fastest AdamW, which may be captured."""
    on_gpu = any(dy.is_cuda for dy in dys)
    optimizer = torch.optim.AdamW(module.parameters(), RATE, fused=True, capturable=on_gpu)

    def call_of(images: Sequence[Inputs]) -> Marked:
        turns = cycle(images)

        def call(mark: Mark = unmarked) -> None:
            optimizer.zero_grad()
            mark(START)
            loss = _loss(run(*next(turns)), *dys)
            mark("forward")
            loss.backward()
            mark("backward")
            optimizer.step()
            mark("optimizer")

        return call

    return call_of


def steps_of_plan(tuned: TunedModule, dys: Sequence[Tensor]) -> CallOf:
    """The step as plantune takes it."""
    # Where kernels of ours take the step, that it is fused does not count.
    optimizer = torch.optim.AdamW(tuned.parameters(), RATE, fused=True)
    step = TrainStep(tuned, _loss, optimizer)

    def call_of(images: Sequence[Inputs]) -> Callable[..., object]:
        turns = cycle(images)

        def call(mark: Mark | None = None) -> None:
            if mark is None:
                step(next(turns), *dys)
                return
            mark(START)
            step.marked(mark, next(turns), *dys)

        return call

    return call_of


def _floats(made: Any) -> list[Tensor]:
    leaves = tree_leaves(made)
    return [y for y in leaves if isinstance(y, Tensor) and y.is_floating_point()]


def _loss(made: Any, *dys: Tensor) -> Tensor:
    """Its gradients are those of the passes alone."""
    terms = zip(_floats(made), dys, strict=True)
    return torch.stack([(y.float() * dy.float()).sum() for y, dy in terms]).sum()
