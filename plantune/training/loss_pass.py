"""Forward and backward pass of a model and its loss, whole or in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from plantune.runtime.captured.own_leaves import own_leaf, standing_in
from plantune.runtime.captured.rehearsal import is_rehearsing
from plantune.runtime.watched.torch_internals import is_capturing
from plantune.training.caller_settings import CallerSettings

Function = Callable[..., Any]
# What torch says of a tensor that is no part of a graph.
UNUSED = "not have been used in the graph"
NOT_THE_MODELS = (
    "the loss depends on no parameter of the optimizer: make it of the parameters of the model "
    "that the step is given, which is a copy if optimize or tune made it without share=True"
)


@dataclass(frozen=True)
class LossPass:
    """`loss(model(*inputs), *targets)` and its gradients with regard to `parameters`. In a capture,
    and in the runs before it, plans see leaves of the pass's own if it is to be `captured`.
    `settings` say under which autocast model and loss run.
    """

    model: Function
    loss: Function
    parameters: Sequence[Tensor]
    micro_batches: int = 1
    settings: CallerSettings = field(default_factory=CallerSettings)
    captured: bool = False
    # Whether a loss asked for gradients of the parameters themselves.
    asked: list[bool] = field(default_factory=list)
    # Whether a loss depended on a parameter: later ones may be of other parts of a model.
    depended: list[bool] = field(default_factory=list)

    def run(
        self,
        inputs: tuple[Any, ...],
        targets: tuple[Any, ...],
        scale: Tensor | None,
        take: Callable[[int, Sequence[Tensor | None]], None],
        mark: Callable[[str], None] | None = None,
    ) -> Any:
        """What the loss returns, detached: of micro-batches the mean. `mark` is told the name of
        each part when it ends.

        `take` gets the number of each micro-batch with its gradients, times `scale`; None stands
        for a parameter that the loss does not depend on.
        """
        values = []
        own = self._own_leaves()
        for number, (part, of_part) in enumerate(self._parts(inputs, targets)):
            with torch.enable_grad(), self._casting(), standing_in(own):
                value = self._value(part, of_part, own)
                total = _loss_of(value)
                total = total / self.micro_batches if self.micro_batches > 1 else total
                scaled = total if scale is None else total * scale.to(total.dtype).view(())
            if mark is not None:
                mark("forward")
            take(number, self._gradients(scaled, own))
            if mark is not None:
                mark("backward")
            values.append(tree_map_only(Tensor, Tensor.detach, value))
        return values[0] if len(values) == 1 else _joined(values)

    def _own_leaves(self) -> dict[int, Tensor]:
        """By the ids of parameters, whose own hooks must be called."""
        if not self.captured or self.asked:
            return {}
        on_gpu = any(p.is_cuda for p in self.parameters)
        if not is_rehearsing() and not (on_gpu and is_capturing()):
            return {}
        return {id(p): own_leaf(p) for p in self.parameters if not p._backward_hooks}

    def _value(
        self, part: tuple[Any, ...], of_part: tuple[Any, ...], own: dict[int, Tensor]
    ) -> Any:
        """What the loss returns. One that asks for gradients of parameters, as a penalty for these
        does, finds that they are not in the graph: from then on they are.
        """
        try:
            return self.loss(self.model(*part), *of_part)
        except RuntimeError as error:
            if not own or not is_rehearsing() or UNUSED not in str(error):
                raise
        own.clear()
        self.asked.append(True)
        return self.loss(self.model(*part), *of_part)

    def _gradients(self, loss: Tensor, own: Mapping[int, Tensor]) -> list[Tensor | None]:
        """Through plans and past them."""
        found = torch.autograd.grad(loss, [*self.parameters, *own.values()], allow_unused=True)
        if not self.depended:
            if all(gradient is None for gradient in found):
                raise ValueError(NOT_THE_MODELS)
            self.depended.append(True)
        count = len(self.parameters)
        through = dict(zip(own, found[count:], strict=True))
        pairs = zip(self.parameters, found[:count], strict=True)
        return [_dense(_sum(through.get(id(parameter)), past)) for parameter, past in pairs]

    def _casting(self) -> AbstractContextManager[Any]:
        if self.settings.autocast is None:
            return nullcontext()
        kind, dtype = self.settings.autocast
        # Without its cache: kept casts of weights would outlive a step that changes these.
        return torch.autocast(kind, dtype=dtype, cache_enabled=False)

    def _parts(
        self, inputs: tuple[Any, ...], targets: tuple[Any, ...]
    ) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        count = self.micro_batches
        if count == 1:
            yield inputs, targets
            return
        leaves, structure = tree_flatten((inputs, targets))
        batch = next(leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim())
        if batch % count:
            raise ValueError(f"a batch of {batch} has no {count} equal micro-batches")
        size = batch // count

        def part(leaf: Any, start: int) -> Any:
            whole = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch
            return leaf[start : start + size] if whole else leaf

        for start in range(0, batch, size):
            yield tree_unflatten([part(leaf, start) for leaf in leaves], structure)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return one if other is None else other if one is None else one + other


def _dense(gradient: Tensor | None) -> Tensor | None:
    """An embedding's may be sparse; gradients lie side by side."""
    if gradient is None or gradient.layout == torch.strided:
        return gradient
    return gradient.to_dense()


def _loss_of(value: Any) -> Tensor:
    """The number to be made smaller: what a loss returns, or the first of a tuple."""
    loss = value[0] if isinstance(value, (tuple, list)) and value else value
    if torch.is_inference_mode_enabled():
        raise ValueError("inside of torch.inference_mode() there are no gradients: train outside")
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise ValueError(
            "the loss must return one number that depends on the parameters, or a tuple that "
            f"begins with it; got {got}"
        )
    return loss.reshape(())


def _joined(values: Sequence[Any]) -> Any:
    """Of single numbers the mean, of other tensors all rows; else what the last one returned."""
    leaves, structures = zip(*map(tree_flatten, values), strict=True)

    def join(column: tuple[Any, ...]) -> Any:
        first = column[0]
        if not isinstance(first, Tensor):
            return column[-1]
        if first.numel() == 1 and first.is_floating_point():
            return torch.stack(column).mean(0)
        return torch.cat(column) if first.dim() else torch.stack(column)

    return tree_unflatten([join(column) for column in zip(*leaves, strict=True)], structures[0])
