"""Rewrites of a layer graph that keep its meaning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from plantune.graph.builder import GraphBuilder
from plantune.graph.graph import Graph, Node
from plantune.graph.ops import op_named
from plantune.graph.ops.cast import INSERTED
from plantune.graph.types import TensorType

OURS: dict[str, Any] = {INSERTED: True}  # casts that the user's code does not have


def without_dead_nodes(graph: Graph) -> Graph:
    """The graph without nodes, parameters and buffers on which no result depends."""
    needed = set(graph.results)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if not needed.isdisjoint(node.outputs):
            kept.append(node)
            needed.update(node.inputs)
    needed.update(target for target, _ in graph.updates)
    start = graph.backward_from
    if start is not None:
        start = sum(node.name not in graph.backward_nodes for node in kept)
    return replace(
        graph,
        nodes=tuple(reversed(kept)),
        backward_from=start,
        parameters=tuple(pair for pair in graph.parameters if pair[0] in needed),
        buffers=tuple(pair for pair in graph.buffers if pair[0] in needed),
    )


def without_spreads(graph: Graph) -> Graph:
    """Arithmetic takes a smaller operand as it is: it repeats one itself, without a pass over the
    whole.
    """
    smaller = {node.name: found for node in graph.nodes if (found := _unspread(graph, node))}
    if not smaller:
        return graph

    def rule(new: _New) -> tuple[str, ...] | None:
        if new.node.name in smaller:
            new.inputs[:] = map(new.now, smaller[new.node.name])
        return None

    return _rebuilt(graph, rule)


def _unspread(graph: Graph, node: Node) -> tuple[str, str] | None:
    """What a node is to read, if an operand is repeated for it; the whole one stands first."""
    if node.op not in ("add", "mul", "sub", "div"):
        return None
    spread = [
        maker is not None and maker.op == "broadcast_to"
        for maker in map(graph.producers.get, node.inputs)
    ]
    whole, other = node.inputs
    if spread == [True, False] and node.op in ("add", "mul"):
        fits = graph.types[other].shape == graph.types[whole].shape
        return (other, graph.producers[whole].inputs[0]) if fits else None
    return (whole, graph.producers[other].inputs[0]) if spread[1] else None


def with_space_to_depth(graph: Graph) -> Graph:
    """Finds the op that moves blocks of pixels into channels: a reshape that splits pixels, a
    permutation and a reshape that joins them.
    """
    found = {
        node.name: block
        for node in graph.nodes
        if node.op == "reshape" and (block := _block_of(graph, node)) is not None
    }
    if not found:
        return graph

    def rule(new: _New) -> tuple[str, ...] | None:
        if new.node.name not in found:
            return None
        image, block = found[new.node.name]
        return (new.emit("space_to_depth", new.now(image), block=block),)

    return _rebuilt(graph, rule)


def _block_of(graph: Graph, joined: Node) -> tuple[str, int] | None:
    """The image and the block that a reshape joins into channels."""
    moved = graph.producers.get(joined.inputs[0])
    split = graph.producers.get(moved.inputs[0]) if moved is not None else None
    if moved is None or split is None or (moved.op, split.op) != ("permute", "reshape"):
        return None
    image, parts = graph.types[split.inputs[0]].shape, split.types[0].shape
    if len(image) != 4 or len(parts) != 6 or moved.attrs["dims"] != (0, 3, 5, 1, 2, 4):
        return None
    n, c, h, w = image
    block = parts[3]
    wanted = (n, c, h // block, block, w // block, block)
    whole = parts == wanted and joined.types[0].shape == (n, c * block**2, h // block, w // block)
    return (split.inputs[0], block) if whole else None


def fold_scales(graph: Graph) -> Graph:
    """Moves a constant channel scale that follows a convolution into its weight.

    conv(x, w) * s becomes conv(x, w * s), and (conv(x, w) + b) * s becomes conv(x, w * s) + b * s:
    what is scaled then is constant, so it is computed when a weight changes and not in every call.
    """
    return _scales_in_weights(_biases_after_scales(graph))


def round_constants_once(graph: Graph) -> Graph:
    """Computes in float32 what follows from 16-bit weights alone, and rounds where it is used.

    A batch norm that is folded into a weight is a chain of five ops: rounded after each, resnet18
    in float16 erred up to 2.4 times as much as eager.
    """
    if not any(_is_16_bits(graph.types[name]) for name in graph.constants):
        return graph
    wide: dict[str, str] = {}

    def widened(builder: GraphBuilder, value: str) -> str:
        if not _is_16_bits(builder.types[value]):
            return value
        if value not in wide:
            (wide[value],) = builder.emit("cast", value, dtype="float32", **OURS)
        return wide[value]

    def rule(new: _New) -> tuple[str, ...] | None:
        node, builder = new.node, new.builder
        constant = graph.constants.issuperset(node.outputs)
        if not constant or node.op == "cast" or not op_named(node.op).pointwise:
            return None
        operands = [widened(builder, value) for value in new.inputs]
        result = new.emit(node.op, *operands, **node.attrs)
        if not _is_16_bits(builder.types[new.inputs[0]]):
            return (result,)
        rounded = new.emit("cast", result, dtype=node.types[0].dtype, **OURS)
        wide[rounded] = result
        return (rounded,)

    return _rebuilt(graph, rule)


def _is_16_bits(type_: TensorType) -> bool:
    return type_.is_float and type_.torch_dtype.itemsize == 2


@dataclass(frozen=True)
class _New:
    """A node that is rebuilt, with its new inputs; `now` gives the new names of old values."""

    builder: GraphBuilder
    node: Node
    inputs: list[str]
    now: Callable[[str], str]

    def emit(self, op: str, *inputs: str, **attrs: Any) -> str:
        """Adds a node at the place of this one."""
        return self.builder.emit(op, *inputs, place=_place(self.node), **attrs)[0]


def _rebuilt(graph: Graph, rule: Callable[[_New], tuple[str, ...] | None]) -> Graph:
    """The graph with the values that `rule` makes for each node; None keeps the node.

    What follows from weights alone goes first, so that a rule may use it anywhere.
    """
    builder = GraphBuilder.extending(replace(graph, nodes=(), outputs=(), updates=()))
    renamed: dict[str, str] = {}

    def now(value: str) -> str:
        return renamed.get(value, value)

    for node in sorted(graph.nodes, key=lambda node: not graph.constants.issuperset(node.outputs)):
        inputs = [now(value) for value in node.inputs]
        outputs = rule(_New(builder, node, inputs, now))
        if outputs is None:
            outputs = builder.emit(node.op, *inputs, place=_place(node), **node.attrs)
        renamed.update(zip(node.outputs, outputs, strict=True))
    builder.updates = [(buffer, now(value)) for buffer, value in graph.updates]
    return builder.build(tuple(now(value) for value in graph.outputs))


def _place(node: Node) -> str:
    return node.name.rpartition("/")[0]


def _biases_after_scales(graph: Graph) -> Graph:
    """(y + b) * s as y * s + b * s, where y is a convolution and b and s are constant."""
    swapped = {
        scale.name: node
        for node in graph.nodes
        if node.op == "add_channel"
        and node.attrs["axis"] == 1
        and node.inputs[1] in graph.constants
        and _is_conv(graph, node.inputs[0])
        and (scale := _scale_after(graph, node)) is not None
    }

    def rule(new: _New) -> tuple[str, ...] | None:
        if new.node in swapped.values():
            return (new.inputs[0],)
        if new.node.name not in swapped:
            return None
        y, scale = new.inputs
        y = new.emit("mul_channel", y, scale, axis=1)
        bias = new.emit("mul", new.now(swapped[new.node.name].inputs[1]), scale)
        return (new.emit("add_channel", y, bias, axis=1),)

    return _rebuilt(graph, rule)


def _is_conv(graph: Graph, value: str) -> bool:
    producer = graph.producers.get(value)
    return producer is not None and producer.op == "conv2d"


def _scales_in_weights(graph: Graph) -> Graph:
    """conv(x, w) * s as conv(x, w * s), where w and s are constant."""
    scales = {
        node.name: scale
        for node in graph.nodes
        if node.op == "conv2d"
        and node.inputs[1] in graph.constants
        and (scale := _scale_after(graph, node)) is not None
    }

    def rule(new: _New) -> tuple[str, ...] | None:
        if new.node in scales.values():
            return (new.inputs[0],)
        if new.node.name in scales:
            factor = new.now(scales[new.node.name].inputs[1])
            new.inputs[1] = new.emit("mul_channel", new.inputs[1], factor, axis=0)
        return None

    return _rebuilt(graph, rule)


def _scale_after(graph: Graph, node: Node) -> Node | None:
    """The constant channel scale that alone reads the value of this node."""
    readers = graph.consumers[node.name]
    if len(readers) != 1 or node.name in graph.results:
        return None
    (scale,) = readers
    by_channel = scale.op == "mul_channel" and scale.attrs["axis"] == 1
    constant = scale.inputs[-1] in graph.constants
    return scale if constant and by_channel and scale.inputs[0] == node.name else None
