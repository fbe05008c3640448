"""The backward pass of an overload, by torch's own rule."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from plantune.base.canonical import Attrs, canonical
from plantune.errors import UnsupportedModule
from plantune.graph.ops.base import Domain, Gradient, Op, Types
from plantune.graph.ops.history import History, history_of, owned, record, row_major
from plantune.graph.types import TensorType

if TYPE_CHECKING:
    from plantune.graph.ops.overload import OverloadOp

T = TypeVar("T")
BACKWARD = "backward_of_"
# The dtype in which an overload draws random numbers: in another one it draws others.
DRAWS = "draws"
WANTED, GIVEN, UNREAD = "wanted", "given", "unread"
# Overloads whose gradients follow from no number of their inputs: what they read need not be kept.
READS_NOTHING = frozenset(
    f"aten.{name}"
    for name in (
        *("cat.default", "stack.default", "slice.Tensor", "select.int", "split.Tensor"),
        *("split_with_sizes.default", "chunk.default", "unbind.int", "narrow.default"),
        *("dropout.default", "feature_dropout.default", "alpha_dropout.default"),
        *("roll.default", "flip.default", "pixel_shuffle.default", "pixel_unshuffle.default"),
        *("upsample_nearest2d.vec", "upsample_bilinear2d.vec", "upsample_bicubic2d.vec"),
        *("constant_pad_nd.default", "repeat.default", "cumsum.default", "tril.default"),
        *("triu.default", "masked_fill.Scalar", "where.self"),
    )
)
# Of which torch knows no gradient, whereas it knows that there is none of what they stand for.
HAS_NONE = frozenset(("aten.normal_functional.default",))


def unread(forward: OverloadOp, inputs: Types) -> tuple[int, ...]:
    """The inputs that the backward pass does not read."""
    floats = (at for at, type_ in enumerate(inputs) if type_.is_float)
    return tuple(floats) if forward.name in READS_NOTHING else ()


def emit_backward(forward: OverloadOp, grad: Gradient) -> tuple[str | None, ...]:
    """The backward node, which reads what autograd remembers of the forward node."""
    if json.loads(grad.attrs["arguments"]).get("sparse"):
        raise UnsupportedModule(
            f"{forward.name} with sparse=True has sparse gradients, and those of a plan are dense: "
            "make the embedding without sparse=True, and take Adam in place of SparseAdam"
        )
    places, types = range(len(grad.inputs)), tuple(map(grad.type_of, grad.inputs))
    wanted = tuple(at for at in places if types[at].is_float and grad.needs(at))
    given = tuple(at for at, name in enumerate(grad.output_gradients) if name is not None)
    gone = unread(forward, types)
    made = grad.emit_all(
        BACKWARD + forward.name,
        *(name for at, name in enumerate(grad.inputs) if at not in gone),
        grad.remember(**{WANTED: wanted}),
        *(name for name in grad.output_gradients if name is not None),
        **grad.attrs,
        **{WANTED: wanted, GIVEN: given},
        **{UNREAD: canonical([[at, types[at].to_json()] for at in gone])},
    )
    found = dict(zip(wanted, made, strict=True))
    return tuple(found.get(at) for at in places)


@lru_cache(4096)
def has_gradient(
    forward: OverloadOp, types: tuple[TensorType, ...], attrs: Attrs, wanted: tuple[int, ...]
) -> bool:
    """Whether an output follows smoothly from one of these inputs."""
    if forward.name in HAS_NONE:
        return False
    tensors = [torch.empty(t.shape, dtype=t.torch_dtype, device="meta") for t in types]
    try:
        _, history = record(partial(forward.results, attrs=attrs), tensors, wanted)
    except (RuntimeError, NotImplementedError):
        return True  # of some overloads torch knows no gradient without memory
    return any(edge is not None for edge in history.enter)


class OverloadBackward(Op):
    """Reads those inputs of the overload that are not in `unread`, what autograd remembers of the
    forward pass, and the gradients of the outputs in `given`; makes the gradients of the inputs in
    `wanted`.

    Alone, as it is measured, it finds nothing remembered, and runs the overload again.
    """

    multiplies = True

    def __init__(self, forward: OverloadOp) -> None:
        self.forward = forward
        self.name = BACKWARD + forward.name
        self.arity = None

    def infer(self, inputs: Sequence[TensorType], attrs: Attrs) -> Types:
        types = _filled(inputs[: _read(inputs, attrs)], _unread(attrs))
        return tuple(TensorType(types[at].shape, types[at].dtype) for at in attrs[WANTED])

    def evaluate(self, inputs: Sequence[Tensor], attrs: Attrs) -> tuple[Tensor, ...]:
        count, gone = _read(inputs, attrs), _unread(attrs)
        given, seeds = inputs[:count], inputs[count + 1 :]
        history = history_of(inputs[count])
        if history is None:
            zeros = {at: seeds[0].new_zeros(type_.shape) for at, type_ in gone.items()}
            history = self._again(_filled(given, zeros), attrs)
        shapes = _filled([x.shape for x in given], {at: t.shape for at, t in gone.items()})
        made = [
            seeds[0].new_zeros(shapes[at]) if gradient is None else gradient
            for at, gradient in zip(
                attrs[WANTED], history.gradients(attrs[GIVEN], seeds), strict=True
            )
        ]
        return owned(made, inputs, history.held)

    def _again(self, inputs: Sequence[Tensor], attrs: Attrs) -> History:
        if DRAWS in attrs:
            inputs = row_major(inputs)
        return record(partial(self.forward.results, attrs=attrs), inputs, attrs[WANTED])[1]

    def domain(self, position: int, inputs: Sequence[TensorType], attrs: Attrs) -> Domain:
        count, gone = _read(inputs, attrs), _unread(attrs)
        if position >= count:
            return Domain()
        types = _filled(inputs[:count], gone)
        places = [at for at in range(len(types)) if at not in gone]
        return self.forward.domain(places[position], types, attrs)


def _read(inputs: Sequence[Any], attrs: Attrs) -> int:
    """How many inputs of the overload it reads; then comes what autograd remembers."""
    return len(inputs) - len(attrs[GIVEN]) - 1


def _unread(attrs: Attrs) -> dict[int, TensorType]:
    return {at: TensorType.from_json(data) for at, data in json.loads(attrs[UNREAD])}


def _filled(read: Sequence[T], gone: Mapping[int, T]) -> list[T]:
    """One for each input of the overload."""
    rest = iter(read)
    return [gone[at] if at in gone else next(rest) for at in range(len(read) + len(gone))]
