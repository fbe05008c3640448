"""What a spelling may ask of the extraction that calls it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from plantune.graph.operators.scans import RecurrentLayers
from plantune.graph.types import TensorType


class NotRead(Exception):
    """An overload with these arguments is not in the table."""


@dataclass(frozen=True)
class Value:
    """A tensor of the traced program: the value of that name in the graph."""

    name: str


class Reader(ABC):
    """What a spelling may ask of the extraction."""

    @abstractmethod
    def update(self, buffer: Value, value: Value) -> None:
        """After the forward pass the buffer takes `value`; raises NotRead if it is not a buffer."""

    @abstractmethod
    def emit_all(self, op: str, *inputs: Value, **attrs: Any) -> tuple[Value, ...]:
        """Adds a node; its outputs."""

    @abstractmethod
    def torch_op(self, overload: Any, *args: Any, **kwargs: Any) -> Value:
        """Adds one of torch's own overloads, which makes one tensor."""

    def scans(self, layers: RecurrentLayers) -> bool:
        """Whether recurrent layers of torch's are to be read as scans."""
        return False

    def is_stepped(self) -> bool:
        """Whether what is read now goes into floor, a comparison or the like."""
        return False

    def is_inserted(self) -> bool:
        """Whether what is read now is not in the user's code, as a cast of autocast's."""
        return False

    @abstractmethod
    def type_of(self, value: Value) -> TensorType:
        """Shape and dtype of a value."""

    @cached_property
    def numbers(self) -> dict[Value, float]:
        """Values that are one number everywhere, with that number."""
        return {}

    def emit(self, op: str, *inputs: Value, **attrs: Any) -> Value:
        return self.emit_all(op, *inputs, **attrs)[0]

    def shape(self, value: Value) -> tuple[int, ...]:
        return self.type_of(value).shape
