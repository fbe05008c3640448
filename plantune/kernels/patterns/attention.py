"""Reads steps as attention: two products with a softmax between them, and views around them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plantune.errors import IllegalCandidate
from plantune.graph import Node, Step, TensorType
from plantune.graph.ops import op_named
from plantune.graph.ops.overload import ARGUMENTS, MATMUL, SOFTMAX, OverloadOp
from plantune.kernels.family import Parts
from plantune.kernels.legality import not_the_end_alone, refuse

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Operand:
    """Where an input has what a product reads: (batches, heads, rows, columns) of these strides."""

    name: str
    offset: int
    strides: Sizes


@dataclass(frozen=True)
class Addend:
    """An input that is added to scores of `sizes`, with its strides there: 0 where it is broadcast.
    The last two sizes are those of a score's matrix, the others count all matrices.
    """

    name: str
    sizes: Sizes
    strides: Sizes


@dataclass(frozen=True)
class AttentionParts(Parts):
    """y = softmax(queries * keys transposed * scale + addends) * values.

    `made` are the strides of y's batches, heads and rows.
    """

    queries: Operand
    keys: Operand
    values: Operand
    scale: float
    addends: tuple[Addend, ...]
    sizes: Sizes  # batches, heads, rows, keys, columns of a key, columns of a value
    made: Sizes


@dataclass
class _View:
    """A value that is an input's memory in other strides, times a factor."""

    name: str
    tensor: Tensor
    scale: float = 1.0

    def operand(self) -> Operand:
        return Operand(self.name, int(self.tensor.storage_offset()), self.tensor.stride())


@dataclass
class _Reading:
    """What was read of the nodes so far; `last` is the value that the next one goes on from."""

    step: Step
    views: dict[str, _View]
    scale: float = 1.0
    products: list[tuple[_View, ...]] = field(default_factory=list)
    addends: list[Addend] = field(default_factory=list)
    last: str = ""
    axes: tuple[int, ...] | None = None

    def take(self, node: Node) -> None:
        """Reads one node; raises IllegalCandidate if it has no place here."""
        if node.op == MATMUL:
            self._product(node)
        elif node.inputs[0] in self.views:
            self._view(node)
        elif self.last not in node.inputs:
            raise IllegalCandidate(f"{node.op} at {node.name!r} is not a part of attention")
        elif len(self.products) == 2:
            self._arranged(node)
        else:
            self._score(node)

    def _product(self, node: Node) -> None:
        left, right = _operands(node)
        first = not self.products
        known = [name for name in (left, right) if name in self.views]
        refuse(
            {
                "a product's matrix is not a view of an input": right not in known,
                "the first product is of scores": first and left not in known,
                "there is no softmax between the products": not first
                and (left != self.last or self.axes is None),
                "there are three products": len(self.products) == 2,
            }
        )
        self.products.append(tuple(self.views[name] for name in known))
        self.last = node.name

    def _view(self, node: Node) -> None:
        source = self.views[node.inputs[0]]
        if node.op == "affine":
            refuse({"queries are moved, not only scaled": node.attrs["beta"] != 0})
            scale = source.scale * float(node.attrs["alpha"])
            self.views[node.name] = _View(source.name, source.tensor, scale)
            return
        for name, tensor in zip(node.outputs, _viewed(node, source.tensor), strict=True):
            self.views[name] = _View(source.name, tensor, source.scale)

    def _score(self, node: Node) -> None:
        refuse({"scores are normalised twice, or changed after that": self.axes is not None})
        sizes = self.step.types[self.last].shape
        if node.op == "affine":
            moved = node.attrs["beta"] != 0 or self.addends
            refuse({"scores are scaled after something was added": bool(moved)})
            self.scale *= float(node.attrs["alpha"])
        elif node.op == "add":
            (other,) = [name for name in node.inputs if name != self.last] or (self.last,)
            refuse({"what is added is not an input": other not in dict(self.step.inputs)})
            refuse({"scores are broadcast": node.types[0].shape != sizes})
            read = torch.empty(self.step.types[other].shape, device="meta").expand(sizes)
            self.addends.append(Addend(other, sizes, read.stride()))
        elif node.op == SOFTMAX:
            along = json.loads(node.attrs[ARGUMENTS])["dim"] % len(sizes)
            refuse({"only along the last axis": along != len(sizes) - 1})
            self.axes = tuple(range(len(sizes)))
        else:
            kept = node.op == "reshape" and node.types[0].shape[-2:] == sizes[-2:]
            refuse({f"{node.op} of scores has no place": not kept})
        self.last = node.name

    def _arranged(self, node: Node) -> None:
        """A permutation of the result, then other shapes of the same memory."""
        assert self.axes is not None
        if node.op == "permute":
            refuse({"the result is moved twice": self.axes != tuple(sorted(self.axes))})
            self.axes = tuple(node.attrs["dims"])
        else:
            refuse({f"{node.op} after attention": node.op != "reshape"})
        self.last = node.name


def attention_parts(step: Step) -> AttentionParts:
    """Reads a step; raises IllegalCandidate with the reason where it is not attention."""
    last = step.nodes[-1].name
    refuse(
        {
            "there are not two products": sum(node.op == MATMUL for node in step.nodes) != 2,
            **not_the_end_alone(step),
            "weights take part in the products": step.phase == "refresh",
        }
    )
    inputs = {name: type_ for name, type_ in step.inputs if name not in step.constants}
    found = _Reading(
        step, {n: _View(n, torch.empty(t.shape, device="meta")) for n, t in inputs.items()}
    )
    for node in step.nodes:
        found.take(node)
    refuse({"the step does not end with attention": found.last != last})
    (queries, keys), (values,) = found.products
    product = [node for node in step.nodes if node.op == MATMUL][-1]
    return _parts(found, product.types[0].shape, queries, keys, values)


def _parts(
    found: _Reading, shape: Sizes, queries: _View, keys: _View, values: _View
) -> AttentionParts:
    """`shape` is that of the result, before it is arranged."""
    ranks = {len(shape), *(view.tensor.dim() for view in (queries, keys, values))}
    refuse({"matrices have no batches, or too many": ranks not in ({3}, {4})})
    refuse({"values are scaled": values.scale != 1})
    assert found.axes is not None
    arranged = tuple(shape[axis] for axis in found.axes)
    places = dict(zip(found.axes, TensorType(arranged).strides("nchw"), strict=True))
    refuse({"a result's columns are apart": places[len(shape) - 1] != 1})
    for view in (queries, keys, values):
        view.tensor = view.tensor if len(shape) == 4 else view.tensor.unsqueeze(1)
    keys.tensor = keys.tensor.transpose(-1, -2)
    made = [places[axis] for axis in range(len(shape) - 1)]
    made = made if len(shape) == 4 else [made[0], 0, made[1]]
    lead = {view.tensor.shape[:2] for view in (queries, keys, values)}
    refuse({"matrices are broadcast": len(lead) > 1})
    rows, width = queries.tensor.shape[2:]
    wide = values.tensor.shape[3]
    return AttentionParts(
        found.step,
        queries.operand(),
        keys.operand(),
        values.operand(),
        found.scale * queries.scale * keys.scale,
        tuple(found.addends),
        (*queries.tensor.shape[:2], rows, keys.tensor.shape[2], width, wide),
        tuple(made),
    )


def _operands(node: Node) -> tuple[str, str]:
    given = json.loads(node.attrs[ARGUMENTS])
    left, right = (node.inputs[given[name]["tensor"]] for name in ("self", "other"))
    return left, right


def _viewed(node: Node, source: Tensor) -> Sequence[Tensor]:
    """What a node makes of a tensor without memory, as views; raises IllegalCandidate if it moves
    anything.
    """
    op = op_named(node.op)
    if node.op == "permute":
        return (source.permute(node.attrs["dims"]),)
    if node.op == "reshape":
        try:
            return (source.view(node.attrs["shape"]),)
        except RuntimeError as reason:
            raise IllegalCandidate(f"{node.name!r} is not a view") from reason
    places = range(len(node.outputs))
    known = isinstance(op, OverloadOp) and op.viewed(node.attrs) == 0 and len(node.inputs) == 1
    refuse({f"{node.op} at {node.name!r} is not a view": not known})
    assert isinstance(op, OverloadOp)
    made = op.evaluate_loosely([source], node.attrs, places)
    refuse({f"{node.op} at {node.name!r} moves": not all(_shares(m, source) for m in made)})
    return made


def _shares(made: Tensor, source: Tensor) -> bool:
    return made._base is not None and made._base is (
        source if source._base is None else source._base
    )
