"""Reads steps as squeeze-and-excite: the mean of an image, two small layers, a gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from plantune.errors import IllegalCandidate
from plantune.graph import Node, Step, TensorType
from plantune.graph.contraction import stores_as_made
from plantune.graph.free_casts import is_free_at_end
from plantune.graph.ops.functions import FUNCTIONS
from plantune.kernels.family import Parts
from plantune.kernels.patterns.epilogue import offset_by, usual_chain
from plantune.kernels.patterns.expression import ADDED, Chain
from plantune.kernels.patterns.pointwise_conv import is_pointwise

NO_COPIES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Layer:
    """A linear layer from `depth` to `width` channels: its constant weight, as (width, depth)
    where `by_rows`, and its bias.
    """

    weight: str
    by_rows: bool
    bias: str | None
    width: int
    depth: int

    def rows(self, weight: Tensor) -> Tensor:
        """The weight as (width, depth); that of a 1x1 convolution has two more axes."""
        rows = weight.flatten(1) if weight.dim() == 4 else weight
        return rows if self.by_rows else rows.t()


@dataclass(frozen=True)
class SqueezeExcite:
    """y = x * gate(W2 function(W1 mean(x) + b1) + b2), then what `chain` names.

    `functions` are the two in front of the gates, relu and sigmoid in most networks. What follows
    the gates is optional, and so are the biases. `offset` is one value. Values
    by which the step is left: `means`, `hidden` and `gates` (a value and its reshape may both
    leave), `unshifted` before the offset, and `result`, None if the gates are the end.
    """

    image: str
    squeeze: Layer
    excite: Layer
    functions: tuple[str, str]
    residual: str | None
    chain: Chain
    offset: str | None
    means: tuple[str, ...]
    hidden: str | None
    gates: tuple[str, ...]
    unshifted: str | None
    result: str | None


@dataclass(frozen=True)
class Head:
    """What a step does to the image before its mean: a scale, then a shift, each optional."""

    image: str
    scale: str | None
    shift: str | None


@dataclass(frozen=True)
class TailParts(Parts):
    """A step that is squeeze-and-excite with what follows its gates."""

    tail: SqueezeExcite

    @property
    def image(self) -> TensorType:
        """The type of the image that it reads."""
        return self.step.types[self.tail.image]


def copies_of(step: Step) -> dict[str, str]:
    """The casts that only leave a contracted step, and what each is a copy of."""
    read = {value for node in step.nodes for value in node.inputs}
    return {
        node.name: node.inputs[0]
        for node in step.nodes
        if node.name not in read
        and node.inputs
        and is_free_at_end(node, step.types[node.inputs[0]])
        and stores_as_made(step, node)
    }


def head_of(step: Step, nodes: Sequence[Node]) -> tuple[Head, Sequence[Node]]:
    """The head of these nodes of a step, and those from the mean on."""
    nodes, numbers = list(nodes), dict[str, str]()
    image = last = nodes[0].inputs[0]
    for op in ("mul", "add"):
        if nodes[0].op == op:
            node = nodes.pop(0)
            first, numbers[op] = node.inputs
            if not nodes or first != last or not _is_number(step, numbers[op]):
                raise IllegalCandidate(f"{node.name!r} is not {last!r} with one constant value")
            last = node.name
    return Head(image, numbers.get("mul"), numbers.get("add")), nodes


def _is_number(step: Step, name: str) -> bool:
    return step.types[name].numel == 1 and name in step.constants


def squeeze_excite_of(
    step: Step,
    nodes: Sequence[Node],
    copies: Mapping[str, str] = NO_COPIES,
    *,
    any_function: bool = False,
) -> SqueezeExcite:
    """Reads these last nodes of a step; raises IllegalCandidate with the reason.

    Means and gates may leave as `copies`, too. Where the kernel takes `any_function` of the table,
    it need not be relu, and sigmoid.
    """
    chain = _Chain(step, nodes)
    firsts, seconds = (tuple(FUNCTIONS),) * 2 if any_function else (("relu",), ("sigmoid",))
    image = chain.last
    means = chain.means()
    squeeze = chain.layer()
    first = chain.need(*firsts)
    excite = chain.layer()
    second = chain.need(*seconds)
    gates = [second.name, *chain.reshaped()]
    residual = function = offset = unshifted = result = None
    by = "offset"
    if chain.rest:
        chain.gated(image)
        residual = chain.residual()
        function = chain.function()
        before, adding = chain.last, chain.rest[:1]
        offset = chain.offset()
        by = offset_by(adding[0]) if offset is not None else by
        if by not in ADDED:
            raise IllegalCandidate(f"{chain.last!r} is off by other numbers than its dtype's")
        result = chain.last
        unshifted = before if before != result else None
    if chain.rest:
        raise IllegalCandidate(f"{chain.rest[0].op} at {chain.rest[0].name!r} has no place")
    left = _Leaving(step, nodes, copies)
    read = SqueezeExcite(
        image=image,
        squeeze=squeeze,
        excite=excite,
        functions=(first.op, second.op),
        residual=residual,
        chain=usual_chain(residual, function, offset, by),
        offset=offset,
        means=left.of(*means),
        hidden=left.one(first.name),
        gates=left.of(*gates),
        unshifted=left.one(unshifted),
        result=left.one(result),
    )
    left.require_none()
    return read


class _Leaving:
    """The values of some nodes that leave the step, until a part has taken each."""

    def __init__(self, step: Step, nodes: Sequence[Node], copies: Mapping[str, str]) -> None:
        made = {node.name for node in nodes}
        self.names = [name for name, _ in step.outputs if name in made]
        self.copies = copies

    def of(self, *wanted: str) -> tuple[str, ...]:
        """Those that leave, and their copies."""
        copies = tuple(name for name, source in self.copies.items() if source in wanted)
        found = tuple(name for name in wanted if name in self.names) + copies
        self.names = [name for name in self.names if name not in found]
        return found

    def one(self, wanted: str | None) -> str | None:
        if wanted is None or wanted not in self.names:
            return None
        self.names.remove(wanted)
        return wanted

    def require_none(self) -> None:
        if self.names:
            raise IllegalCandidate(f"{self.names[0]!r} stays inside, but is read outside")


class _Chain:
    """Takes nodes one by one; each must read the value of the one before it."""

    def __init__(self, step: Step, nodes: Sequence[Node]) -> None:
        self.step, self.rest = step, list(nodes)
        self.last = self.rest[0].inputs[0]

    def take(self, *ops: str) -> Node | None:
        """The next node if it is one of `ops`."""
        if not self.rest or self.rest[0].op not in ops:
            return None
        node = self.rest.pop(0)
        if self.last not in node.inputs:
            raise IllegalCandidate(f"{node.name!r} does not read {self.last!r} before it")
        self.last = node.name
        return node

    def need(self, *ops: str) -> Node:
        node = self.take(*ops)
        if node is None:
            there = self.rest[0].op if self.rest else "nothing"
            wanted = ops[0] if len(ops) <= 2 else "a function"
            raise IllegalCandidate(f"{self.last!r} is followed by {there}, not by {wanted}")
        return node

    def reshaped(self) -> list[str]:
        """The values of reshapes, which move nothing here: (N, C) or (N, C, 1, 1)."""
        names = []
        before = self.last
        while (node := self.take("reshape")) is not None:
            old, new = (self.step.types[name].shape for name in (before, node.name))
            if new[:2] != old[:2]:
                raise IllegalCandidate(f"{node.name!r} mixes images or channels")
            names.append(node.name)
        return names

    def means(self) -> list[str]:
        image = self.last
        mean = self.need("mean")
        if len(self.step.types[image].shape) != 4 or mean.attrs["dims"] != (2, 3):
            raise IllegalCandidate(f"{mean.name!r} is not the mean of an image's pixels")
        return [mean.name, *self.reshaped()]

    def layer(self) -> Layer:
        x = self.last
        product = self.need("matmul", "conv2d")
        pixel = product.op == "conv2d"
        plain = is_pointwise(self.step, product) if pixel else not product.attrs["transpose_a"]
        if product.inputs[0] != x or not plain:
            raise IllegalCandidate(f"{product.name!r} is not a layer of {x!r}")
        weight, bias = self._constant(product.inputs[1]), None
        if (node := self.take("add_channel")) is not None:
            bias = self._constant(node.inputs[1])
            if node.inputs[0] != product.name or node.attrs["axis"] != 1:
                raise IllegalCandidate(f"{node.name!r} is not one bias per column")
        width, depth = self.step.types[product.name].shape[1], self.step.types[x].shape[1]
        return Layer(weight, pixel or bool(product.attrs["transpose_b"]), bias, width, depth)

    def gated(self, image: str) -> None:
        gate = self.last
        node = self.need("mul")
        n, c = self.step.types[image].shape[:2]
        if node.inputs != (image, gate) or self.step.types[gate].shape != (n, c, 1, 1):
            raise IllegalCandidate(f"{node.name!r} is not {image!r} times its gates")

    def residual(self) -> str | None:
        """The image that is added, in either order."""
        other = self._added()
        if other is None or self.step.types[other].shape != self.step.types[self.last].shape:
            return None
        if other in self.step.constants or other == self.last:
            raise IllegalCandidate(f"{other!r} is not an image that may be added")
        self.need("add")
        return other

    def function(self) -> str | None:
        node = self.take(*FUNCTIONS)
        return None if node is None else node.op

    def offset(self) -> str | None:
        """The one value that is added."""
        other = self._added()
        if other is None or self.step.types[other].numel != 1:
            return None
        self.need("add", "add_apart")
        return other

    def _added(self) -> str | None:
        """What the next node adds to the value before it."""
        if not self.rest or self.rest[0].op not in ("add", "add_apart"):
            return None
        first, second = self.rest[0].inputs
        return first if second == self.last else second

    def _constant(self, name: str) -> str:
        if name not in self.step.constants:
            raise IllegalCandidate(f"{name!r} is not constant between calls")
        return name
