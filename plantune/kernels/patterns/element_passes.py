"""What the gradient of squeeze-and-excite makes of single elements, in two passes over an image."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from plantune.graph import Node, Step, TensorType
from plantune.kernels.family import Parts
from plantune.kernels.patterns import pointwise_chain
from plantune.kernels.patterns.excite_gradient import ExciteGradient
from plantune.kernels.patterns.pointwise_chain import NONE, Operand


@dataclass(frozen=True)
class Pass:
    """What is made of single elements in one pass: `lines` of C++ make `results` from `operands`,
    which are whole `images` and `small` values.
    """

    images: tuple[str, ...]
    small: tuple[Operand, ...]
    operands: tuple[Operand, ...]
    lines: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class ElementParts(Parts):
    """A gradient, and what the two passes over an image make of single elements.

    `stored` leave from the first and from the second pass, and `sums` are of what each makes.
    """

    gradient: ExciteGradient

    @property
    def image(self) -> TensorType:
        return self.step.types[self.gradient.total.inputs[0]]

    @property
    def channels(self) -> int:
        return self.image.shape[1]

    @property
    def hidden(self) -> int:
        return self.gradient.excite.matrix.width

    @property
    def pixels(self) -> int:
        return self.image.shape[2] * self.image.shape[3]

    @cached_property
    def stored(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        leaving = dict(self.step.outputs)
        first, second = (
            tuple(node.name for node in nodes if node.name in leaving)
            for nodes in (self.gradient.first, self.gradient.second)
        )
        return first, second

    @cached_property
    def sums(self) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
        late = {node.name for node in self.gradient.second}
        sums = self.gradient.sums
        first = tuple(node for node in sums if node.inputs[0] not in late)
        return first, tuple(node for node in sums if node.inputs[0] in late)

    @cached_property
    def kept(self) -> tuple[str, ...]:
        """Values of the first pass that the second one would make from two images or more."""
        several: set[str] = set()
        sources = {name: frozenset((name,)) for name in self.stored[0]}
        for node in self.gradient.first:
            if node.name in sources:
                continue
            own = frozenset().union(*(self._sources(value, sources) for value in node.inputs))
            several |= {node.name} if len(own) > 1 else set()
            sources[node.name] = frozenset((node.name,)) if len(own) > 1 else own
        cut = {*self.stored[0], *several}
        inner = [node for node in self.gradient.first if node.name not in cut]
        reads = {value for node in self.gradient.second for value in node.inputs}
        reads |= {v for n in inner if n.name in _needed(reads, inner) for v in n.inputs}
        return tuple(node.name for node in self.gradient.first if node.name in several & reads)

    def _sources(self, value: str, known: Mapping[str, frozenset[str]]) -> frozenset[str]:
        if value in known:
            return known[value]
        whole = self.step.types[value].shape == self.gradient.shape
        return frozenset((value,)) if whole else frozenset()

    @property
    def values(self) -> tuple[str, ...]:
        """What the first pass makes in words: what leaves, then what is kept."""
        return (*self.stored[0], *self.kept)

    @cached_property
    def first(self) -> Pass:
        added = (node.inputs[0] for node in self.sums[0])
        wanted = (self.gradient.total.inputs[0], *self.values, *added)
        return self._pass(self.gradient.first, wanted)

    @cached_property
    def second(self) -> Pass:
        """The second pass, from all values that the first one made in words."""
        return self._second(self.values)

    @cached_property
    def second_anew(self) -> Pass:
        """The second pass from what is in memory."""
        return self._second(self.stored[0])

    def _second(self, known: Sequence[str]) -> Pass:
        nodes = (*self.gradient.first, *self.gradient.second)
        wanted = (*self.stored[1], *(node.inputs[0] for node in self.sums[1]))
        return self._pass([node for node in nodes if node.name not in known], wanted)

    def _pass(self, nodes: Sequence[Node], wanted: Sequence[str]) -> Pass:
        needed = _needed(wanted, nodes)
        own = tuple(node for node in nodes if node.name in needed)
        head = self.step.part(own, wanted)
        return _sorted(head, pointwise_chain.expression_of(head))

    @cached_property
    def small(self) -> tuple[Operand, ...]:
        """Values of images and channels, but the spread gradient of the mean."""
        passes = (self.first, self.second, self.second_anew)
        found = dict.fromkeys(operand for one in passes for operand in one.small)
        return tuple(operand for operand in found if operand.name not in self.gradient.spread)


def _needed(wanted: Iterable[str], nodes: Sequence[Node]) -> set[str]:
    """Names of the nodes that values follow from."""
    needed = set(wanted)
    for node in reversed(nodes):
        if node.name in needed:
            needed.update(node.inputs)
    return needed.intersection(node.name for node in nodes)


def _sorted(head: Step, expression: pointwise_chain.Expression) -> Pass:
    """An expression whose operands are whole images, or not."""
    whole = pointwise_chain.whole(head.outputs[-1][1].shape)
    images = tuple(o.name for o in expression.operands if o.axes == whole)
    small = tuple(o for o in expression.operands if o.axes != whole)
    return Pass(images, small, expression.operands, expression.lines, expression.results)


def axes_of(operand: Operand) -> frozenset[int]:
    """The axes of the result along which an operand runs."""
    return frozenset(operand.axes) - {NONE}
