"""What runs the model of a training step: its plan, for inputs of each kind."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor, nn

from plantune.errors import InvalidGraph, UnsupportedModule
from plantune.graph.arguments import Arguments
from plantune.graph.nested import kind_of, tensors_in
from plantune.runtime.module import TunedModule

# Such as whole batches and the last one of an epoch; other calls go to the module itself.
MOST_KINDS = 4


class Models:
    """The tuned modules of one model, made at the first call with inputs of their kind; all compute
    with the model's own weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._made: dict[Hashable, Callable[..., Any]] = {}

    def __call__(self, *inputs: Any) -> Any:
        return self._for(inputs)(*inputs)

    def _for(self, inputs: tuple[Any, ...]) -> Callable[..., Any]:
        if isinstance(self._model, TunedModule):
            return self._model
        kind = kind_of(inputs, _of_leaf)
        try:
            if kind not in self._made and len(self._made) < MOST_KINDS:
                self._made[kind] = self._tuned(inputs)
        except TypeError:  # an argument that cannot be compared
            return self._model
        return self._made.get(kind, self._model)

    def _tuned(self, inputs: tuple[Any, ...]) -> Callable[..., Any]:
        """The model itself where there is no plan for such a call."""
        tensors = tensors_in(inputs)
        if not tensors:
            return self._model
        try:
            return TunedModule(
                self._model,
                Arguments.of(self._model, inputs, {}),
                name=type(self._model).__name__,
                mode="train",
                device=tensors[0].device,
            )
        except (UnsupportedModule, InvalidGraph):
            return self._model


def _of_leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return type(leaf), leaf.shape, leaf.dtype, leaf.device
    kept: Hashable = leaf
    return type(leaf), kept
