"""What a spelling may ask of the extraction that calls it."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plantune.errors import UnsupportedModule
from plantune.graph.types import TensorType

# Readers by module class, function or method name.
Spelled = dict[Any, Callable[..., Any]]


@dataclass(frozen=True)
class Value:
    """A tensor of the traced program: the value of that name in the graph."""

    name: str


class Reader(ABC):
    """What a spelling may ask of the extraction."""

    @abstractmethod
    def state(self, tensor: torch.Tensor) -> Value:
        """The value of a parameter or buffer."""

    @abstractmethod
    def update(self, buffer: torch.Tensor, value: Value) -> None:
        """After the forward pass `buffer` takes `value`."""

    @abstractmethod
    def emit_all(self, op: str, *inputs: Value, **attrs: Any) -> tuple[Value, ...]:
        """Adds a node; its outputs."""

    @abstractmethod
    def type_of(self, value: Value) -> TensorType:
        """Shape and dtype of a value."""

    @abstractmethod
    def unsupported(self, what: str) -> UnsupportedModule:
        """The error for something unknown, with its place in the module."""

    def emit(self, op: str, *inputs: Value, **attrs: Any) -> Value:
        return self.emit_all(op, *inputs, **attrs)[0]

    def shape(self, value: Value) -> tuple[int, ...]:
        return self.type_of(value).shape


def by_attributes(read: Callable[..., Value]) -> Callable[..., Value]:
    """The reader of a module that does what a function does with the module's attributes: torch
    calls them as the function's parameters.
    """
    names = list(inspect.signature(read).parameters)[2:]

    def read_module(g: Reader, module: nn.Module, x: Value) -> Value:
        return read(g, x, **{name: getattr(module, name) for name in names})

    return read_module
