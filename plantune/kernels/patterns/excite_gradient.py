"""Reads steps as the gradient of squeeze-and-excite, with what is done to elements around it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from plantune.errors import IllegalCandidate
from plantune.graph import Node, Step
from plantune.kernels.legality import refuse
from plantune.kernels.patterns.pointwise_chain import cxx_of
from plantune.kernels.patterns.pointwise_conv import is_pointwise
from plantune.kernels.patterns.squeeze_excite import Layer

SUMS = ("sum", "sum_to")


@dataclass(frozen=True)
class LayerGradient:
    """A layer, whose weight takes the gradient `excited` of its result to that of its argument.

    `excited` follows from the gradient of a function's result by the op `derivative`, of the saved
    value `of`. The layer's `argument`, and the gradients of its weight, `by_rows` if it is of
    (width, depth), and bias are there if the step makes them.
    """

    derivative: str
    of: str
    excited: str
    matrix: Layer
    argument: str | None
    by_rows: bool
    weight: str | None
    bias: str | None


@dataclass(frozen=True)
class ExciteGradient:
    """dgate = `total`, the sum of what is made of each element; `excite` and `squeeze` take it to
    `spread`, times `alpha`, of which gradients of elements are made.

    `first` are the nodes of elements that do not depend on `spread`, `second` those that do; `sums`
    are nodes that add up all of an image value.
    """

    shape: tuple[int, ...]
    total: Node
    excite: LayerGradient
    squeeze: LayerGradient
    alpha: float
    spread: frozenset[str]
    first: tuple[Node, ...]
    second: tuple[Node, ...]
    sums: tuple[Node, ...]

    @property
    def layers(self) -> tuple[LayerGradient, LayerGradient]:
        return self.squeeze, self.excite


def excite_gradient_of(step: Step) -> ExciteGradient:
    """Reads a step; raises IllegalCandidate with the reason."""
    return _Reader(step).read()


class _Reader:
    """Takes nodes of a step until each has a place."""

    def __init__(self, step: Step) -> None:
        self.step, self.types = step, step.types
        self.left = {node.name: node for node in step.nodes}
        self.total = self._total()
        self.shape = self.types[self.total.inputs[0]].shape

    def read(self) -> ExciteGradient:
        excite, value = self._layer(self.total.name)
        squeeze, value = self._layer(value)
        alpha, spread = self._scaled(value)
        elements, sums = self._elements(), self._sums()
        second = self._following(elements, spread)
        first = tuple(node for node in elements if node not in second)
        refuse(
            {
                "nothing is made of the mean's gradient": not second,
                **{f"{n.op} at {n.name!r} has no place": True for n in self.left.values()},
            }
        )
        return ExciteGradient(
            self.shape, self.total, excite, squeeze, alpha, spread, first, second, sums
        )

    def _total(self) -> Node:
        """The gradient of the gates: a sum over the pixels of each image and channel."""
        for node in self.step.nodes:
            shape, made = self.types[node.inputs[0]].shape, node.types[0].shape
            if node.op in SUMS and len(shape) == 4 and made in (shape[:2], (*shape[:2], 1, 1)):
                refuse({"an image has one pixel": shape[2] * shape[3] == 1})
                return self.left.pop(node.name)
        raise IllegalCandidate("nothing is added up over the pixels of each image and channel")

    def _layer(self, value: str) -> tuple[LayerGradient, str]:
        """The derivative of a function, then a layer's gradients; and that of its argument."""
        function = self._reader(value)
        known = function.op.endswith("_grad") and cxx_of(function.op) is not None
        of = function.inputs[-1]
        refuse(
            {
                f"{function.op} at {function.name!r} is not a function's derivative": not known,
                f"{of!r} is not a value that was saved": of not in dict(self.step.inputs),
                f"{of!r} is constant between calls": of in self.step.constants,
            }
        )
        excited = self._named(function.name)
        parts: dict[str, Node] = {}
        for node in self._readers(excited):
            part = self._part(node, excited)
            refuse({f"{node.op} at {node.name!r} has no place": part is None or part in parts})
            parts[str(part)] = self.left.pop(node.name)
        if "product" not in parts:
            raise IllegalCandidate(f"{function.name!r} goes through no layer")
        product, weight = parts["product"], parts.get("weight")
        read = LayerGradient(
            derivative=function.op,
            of=of,
            excited=function.name,
            matrix=self._matrix(product),
            argument=None if weight is None else _other(weight, excited),
            by_rows=weight is None or weight.inputs[0] in excited,
            weight=None if weight is None else weight.name,
            bias=parts["bias"].name if "bias" in parts else None,
        )
        return read, product.name

    def _part(self, node: Node, excited: frozenset[str]) -> str | None:
        """Which of a layer's gradients a node is."""
        one_pixel = node.op.startswith("conv2d") and is_pointwise(self.step, node)
        if node.op in SUMS:
            width = self.types[node.inputs[0]].shape[1]
            return "bias" if node.types[0].numel == width else None
        if node.op == "conv2d_wgrad":
            return "weight" if one_pixel and node.inputs[0] in excited else None
        if node.op == "matmul" and node.attrs["transpose_a"]:
            return None if node.attrs["transpose_b"] else "weight"
        layer = node.op == "matmul" or (node.op == "conv2d_dgrad" and one_pixel)
        return "product" if layer and node.inputs[0] in excited else None

    def _matrix(self, product: Node) -> Layer:
        """What takes the gradient of a layer's result to that of its argument."""
        weight = product.inputs[1]
        if weight not in self.step.constants:
            raise IllegalCandidate(f"{weight!r} is not constant between calls")
        by_rows = product.op == "matmul" and bool(product.attrs["transpose_b"])
        depth = self.types[product.inputs[0]].shape[1]
        return Layer(weight, by_rows, None, product.types[0].shape[1], depth)

    def _scaled(self, value: str) -> tuple[float, frozenset[str]]:
        """What the mean's gradient is multiplied with, and the names of the product."""
        names = self._named(value)
        readers = self._readers(names)
        node = readers[0] if len(readers) == 1 else None
        if node is None or node.op != "affine" or node.attrs["beta"]:
            return 1.0, names
        self.left.pop(node.name)
        return float(node.attrs["alpha"]), self._named(node.name)

    def _elements(self) -> tuple[Node, ...]:
        """The nodes that make images of single elements."""
        found = [
            node
            for node in self.left.values()
            if node.types[0].shape == self.shape and cxx_of(node.op) is not None
        ]
        return tuple(self.left.pop(node.name) for node in found)

    def _sums(self) -> tuple[Node, ...]:
        """The nodes that add up all of an image value."""
        found = [
            node
            for node in self.left.values()
            if node.op in SUMS
            and node.types[0].numel == 1
            and self.types[node.inputs[0]].shape == self.shape
        ]
        return tuple(self.left.pop(node.name) for node in found)

    def _following(self, elements: Iterable[Node], spread: frozenset[str]) -> tuple[Node, ...]:
        known, found = set(spread), []
        for node in elements:
            if not known.isdisjoint(node.inputs):
                known.add(node.name)
                found.append(node)
        return tuple(found)

    def _named(self, value: str) -> frozenset[str]:
        """The value and its reshapes, which move nothing here: (N, C) or (N, C, 1, 1)."""
        names = {value}
        for node in [*self.left.values()]:
            if node.op == "reshape" and node.inputs[0] in names:
                old, new = self.types[node.inputs[0]].shape, node.types[0].shape
                refuse({f"{node.name!r} mixes images or channels": new[:2] != old[:2]})
                names.add(self.left.pop(node.name).name)
        return frozenset(names)

    def _readers(self, names: frozenset[str]) -> list[Node]:
        return [node for node in self.left.values() if not names.isdisjoint(node.inputs)]

    def _reader(self, value: str) -> Node:
        """The one node that reads a value."""
        readers = self._readers(names := self._named(value))
        if len(readers) != 1 or readers[0].inputs[0] not in names:
            raise IllegalCandidate(f"{value!r} is not read by one derivative alone")
        return self.left.pop(readers[0].name)


def _other(weight: Node, excited: frozenset[str]) -> str:
    return next((v for v in weight.inputs if v not in excited), weight.inputs[1])
