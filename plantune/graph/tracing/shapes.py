"""What an overload makes, without asking torch: for its own shape rules torch loads Dynamo, which
takes 1.2 s of a first call (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from plantune.base.canonical import Attrs
from plantune.errors import InvalidGraph
from plantune.graph.ops import op_named
from plantune.graph.spelling import OVERLOADS, NotRead, Reader, Value
from plantune.graph.tracing.purity import OUT, Overload, without_writing
from plantune.graph.types import TensorType, dtype_name

META = torch.device("meta")


def made_by(overload: Overload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The tensors without memory that an overload of the table returns; None of any other, and of
    one that returns a view or what it was given.
    """
    writes = overload._schema.is_mutable
    plain = without_writing(overload) if writes else overload
    if plain is None or str(plain) not in OVERLOADS or (not writes and _may_view(plain)):
        return None
    if OUT in kwargs:  # torch says whether it fits
        return None
    shapes = _Shapes()
    try:
        given = tree_map_only(Tensor, shapes.value_of, (args, dict(kwargs)))
        made = OVERLOADS[str(plain)](shapes, *given[0], **given[1])
    except (NotRead, InvalidGraph):
        return None
    if writes:
        return args[0] if shapes.type_of(given[0][0]) == shapes.type_of(made) else None
    if made in tree_leaves(given):
        return None
    return tree_map_only(Value, shapes.empty, made)


def _may_view(overload: Overload) -> bool:
    return any(result.alias_info is not None for result in overload._schema.returns)


class _Shapes(Reader):
    """Reads types alone: no node is made."""

    def __init__(self) -> None:
        self._types: list[TensorType] = []

    def value_of(self, tensor: Tensor) -> Value:
        return self._new(TensorType(tuple(tensor.shape), dtype_name(tensor.dtype)))

    def _new(self, type_: TensorType) -> Value:
        self._types.append(type_)
        return Value(str(len(self._types) - 1))

    def type_of(self, value: Value) -> TensorType:
        return self._types[int(value.name)]

    def empty(self, value: Value) -> Tensor:
        """A tensor of that type, without memory."""
        type_ = self.type_of(value)
        return torch.empty(type_.shape, dtype=type_.torch_dtype, device=META)

    def emit_all(self, op: str, *inputs: Value, **attrs: Any) -> tuple[Value, ...]:
        types = op_named(op).infer([self.type_of(value) for value in inputs], Attrs(attrs))
        return tuple(map(self._new, types))

    def torch_op(self, overload: Overload, *args: Any, **kwargs: Any) -> Value:
        """The spellings ask for tensors of one number, by their size and dtype."""
        if isinstance(args[0], Value):
            raise NotRead("what torch makes of tensors")
        return self._new(TensorType(tuple(args[0]), dtype_name(kwargs["dtype"])))

    def update(self, buffer: Value, value: Value) -> None:
        """Nothing moves."""
