"""Calls with fewer samples than a plan is for: they run with more, which are dropped afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from plantune.graph import TensorType
from plantune.graph.nested import leaves, mapped, tensors_in
from plantune.graph.outputs import TENSOR
from plantune.graph.tracing.arguments import Arguments, ordered
from plantune.graph.tracing.extract import extract_with_outputs


@dataclass(frozen=True)
class Padded:
    """A call with more samples, of which the first `count` are wanted."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    count: int

    def cut(self, result: Any) -> Any:
        return mapped(lambda leaf: leaf[: self.count] if isinstance(leaf, Tensor) else leaf, result)


@dataclass(frozen=True)
class Padding:
    """Samples are the first axis of the first tensor of `example`, and of all with as many there.
    Calls are padded to the next one of `sizes`, which ascend, by their last sample.
    """

    example: Arguments
    sizes: tuple[int, ...]

    @staticmethod
    def of(module: nn.Module, example: Arguments, sizes: Sequence[int]) -> Padding:
        """Raises ValueError if the module's results do not begin with the samples, or if it has
        state.
        """
        if not sizes or any(type(size) is not int or size < 1 for size in sizes):
            raise ValueError(f"pad_to must be whole numbers of samples, 1 or more, got {sizes!r}")
        if not example.types or not example.types[0].shape:
            raise ValueError("pad_to: the first tensor of the example has no axis of samples")
        padding = Padding(example, tuple(sorted({*sizes})))
        padding.check(module)
        return padding

    def check(self, module: nn.Module) -> None:
        """Raises ValueError if samples that are added would count, in the state that it has."""
        _check_results(module, *(self._of_size(self.sizes[0] + more) for more in (0, 1)))

    @property
    def calls(self) -> tuple[Arguments, ...]:
        """Those that need a plan: the example with each number of samples, the most first."""
        return tuple(self._of_size(size) for size in reversed(self.sizes))

    def _is_batched(self, type_: TensorType) -> bool:
        return type_.shape[:1] == self.example.types[0].shape[:1]

    def _of_size(self, size: int) -> Arguments:
        example = self.example

        def resized(leaf: Any) -> Any:
            if not isinstance(leaf, TensorType) or not self._is_batched(leaf):
                return leaf
            return replace(leaf, shape=(size, *leaf.shape[1:]))

        values = tuple(
            value[torch.arange(size) % len(value)]
            if value is not None and self._is_batched(type_)
            else value
            for value, type_ in zip(example.examples, example.types, strict=False)
        )
        args, kwargs = mapped(resized, (example.args, dict(example.kwargs)))
        return replace(example, args=args, kwargs=kwargs, examples=values)

    def larger(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Padded | None:
        """The call with as many samples as the next size has; None if it is of no such kind, or has
        that many.
        """
        tensors, types = tensors_in((args, kwargs)), self.example.types
        if len(tensors) != len(types):
            return None
        order = ordered(module, args, kwargs)[1] if kwargs else range(len(types))
        batched, counts = set(), set()
        for at, type_ in zip(order, types, strict=True):
            shape, is_batched = tuple(tensors[at].shape), self._is_batched(type_)
            if shape[is_batched:] != type_.shape[is_batched:] or len(shape) != len(type_.shape):
                return None
            if is_batched:
                batched.add(id(tensors[at]))
                counts.add(shape[0])
        count = counts.pop()
        size = next((size for size in self.sizes if size >= count), count)
        if counts or size == count or not count:
            return None
        pad = lambda leaf: _with(leaf, size) if id(leaf) in batched else leaf  # noqa: E731
        longer = mapped(pad, (args, dict(kwargs)))
        return Padded(longer[0], longer[1], count)


def _with(tensor: Tensor, size: int) -> Tensor:
    """The tensor with its last sample as often as there are samples missing."""
    more = tensor[-1:].expand(size - len(tensor), *tensor.shape[1:])
    return torch.cat((tensor, more))


def _check_results(module: nn.Module, one: Arguments, more: Arguments) -> None:
    """Each result has as many samples as the call; nothing else depends on their number."""
    traced = [extract_with_outputs(module, call, derives=False) for call in (one, more)]
    graphs = [graph for graph, _ in traced]
    constants = [
        [leaf for leaf in leaves(outputs.made) if leaf is not TENSOR] for _, outputs in traced
    ]
    if any(graph.updates for graph in graphs):
        raise ValueError(
            "pad_to: the module moves buffers, such as a batch norm's statistics, which the "
            "samples added would move, too; call eval() before"
        )
    shapes = [[graph.types[name].shape for name in graph.outputs] for graph in graphs]
    begins = all(
        a[:1] == one.types[0].shape[:1] and b[:1] == more.types[0].shape[:1] and a[1:] == b[1:]
        for a, b in zip(*shapes, strict=True)
    )
    if not begins or constants[0] != constants[1]:
        raise ValueError(
            f"pad_to: {one.types[0].shape[0]} samples make results of shapes {shapes[0]}, one "
            f"more {shapes[1]}; each result must begin with the samples, so that those added can "
            "be dropped"
        )
