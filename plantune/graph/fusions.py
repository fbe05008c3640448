"""Fusions: which ops may share a step, read from `search_spaces/fusions.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from plantune.base.nearest import hint
from plantune.base.paths import data_folder
from plantune.errors import InvalidSearchSpace
from plantune.graph.cast_ends import with_ends
from plantune.graph.graph import Graph, Node
from plantune.graph.ops import OPS, op_named
from plantune.graph.ops.functions import FUNCTIONS
from plantune.graph.ops.overload import CONCAT, MATMUL, ROLL, SELECT, SOFTMAX, UNBIND
from plantune.graph.ops.overload_backward import WANTED
from plantune.graph.step import phase_of

POINTWISE, ACTIVATION, DERIVATIVE = "pointwise", "activation", "activation_grad"
# Overloads of torch that a path may name, by a word.
OVERLOADS = {
    CONCAT: "concat",
    SOFTMAX: "softmax",
    MATMUL: "product",
    SELECT: "select",
    UNBIND: "unbind",
    ROLL: "roll",
}
WORDS = (POINTWISE, ACTIVATION, DERIVATIVE, *OVERLOADS.values())
OPERANDS = ("scalar", "tensor", "broadcast")
# Repeating items on a graph that branches would offer exponentially many groups.
LONGEST = 24


@dataclass(frozen=True)
class Item:
    """One place of a path: what matches, whether it may be missing, whether it may repeat."""

    kinds: frozenset[str]
    optional: bool
    repeats: bool


@dataclass(frozen=True)
class Twig:
    """What else reads the value so far: chains of nodes of these kinds, each if it is there."""

    kinds: tuple[frozenset[str], ...]


@dataclass(frozen=True)
class Fusion:
    """A path, and the `joining` kinds of nodes that are taken along where the group alone reads
    what they make.
    """

    name: str
    path: tuple[Item | Twig, ...]
    joining: frozenset[str] = frozenset()

    @property
    def starts(self) -> Iterator[tuple[Item, tuple[Item | Twig, ...]]]:
        """Each item that a group may begin with, and what may follow it."""
        for place, item in enumerate(self.path):
            if isinstance(item, Item):
                yield item, self.path[place + 1 :]
                if not item.optional:
                    return


def parse_item(text: str, where: str) -> Item | Twig:
    """The item of one string such as `add.scalar|add_channel?`."""
    if text.startswith("+"):
        return Twig(tuple(parse_kinds(part, where) for part in text[1:].split(">")))
    optional, repeats = text.endswith("?"), text.endswith("*")
    kinds = parse_kinds(text.removesuffix("?").removesuffix("*"), where)
    return Item(kinds, optional or repeats, repeats)


def parse_kinds(text: str, where: str) -> frozenset[str]:
    """The kinds of one string such as `add.scalar|add_channel`."""
    kinds = frozenset(text.split("|"))
    for kind in kinds:
        op, _, operand = kind.partition(".")
        if op not in OPS and kind not in WORDS:
            raise InvalidSearchSpace(f"{where}: {kind!r} names no op; see plantune.graph.ops")
        known = OPERANDS if op in OPS and OPS[op].arity == 2 else OPERANDS[:1] * (op == "sum_to")
        if operand and operand not in known:
            raise InvalidSearchSpace(f"{where}: {kind!r}: {op} has no operand {operand!r}")
    return kinds


def load_fusions(path: Path) -> tuple[Fusion, ...]:
    """All fusions of one file; raises InvalidSearchSpace naming the place of a fault."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidSearchSpace(f"{path}: cannot be read: {error}") from error
    fusions = []
    for name, table in tables.items():
        fusions.append(parse_fusion(name, table, f"{path}: [{name}]"))
    return tuple(fusions)


def parse_fusion(name: str, table: Any, where: str) -> Fusion:
    """The fusion of one table."""
    keys = set(table) if isinstance(table, dict) else set()
    items, joining = (table["path"], table.get("joining", [])) if "path" in keys else ([], [])
    strings = all(isinstance(found, list) and _strings(found) for found in (items, joining))
    if not strings or len(items) < 2 or keys - {"path", "joining"}:
        raise InvalidSearchSpace(f"{where}: needs one `path` of two or more strings")
    parsed = tuple(parse_item(item, where) for item in items)
    first = parsed[0]
    if isinstance(first, Twig):
        raise InvalidSearchSpace(f"{where}: the first item of a path cannot branch off")
    if all(isinstance(item, Twig) or item.optional for item in parsed):
        raise InvalidSearchSpace(f"{where}: an item of a path must be there")
    kinds = (parse_kinds(item, where) for item in joining)
    return Fusion(name, parsed, frozenset().union(*kinds))


def _strings(found: list[Any]) -> bool:
    return all(isinstance(item, str) for item in found)


@cache
def all_fusions() -> tuple[Fusion, ...]:
    """The fusions that plantune ships."""
    return load_fusions(data_folder("search_spaces") / "fusions.toml")


def fusions_named(*names: str) -> tuple[Fusion, ...]:
    """Some of the shipped fusions; raises InvalidSearchSpace for an unknown name."""
    known = {fusion.name: fusion for fusion in all_fusions()}
    unknown = [name for name in names if name not in known]
    if unknown:
        told = f"{', '.join(known)}{hint(unknown[0], known)}"
        raise InvalidSearchSpace(f"no fusion is called {unknown}; known: {told}")
    return tuple(known[name] for name in names)


def kinds_of(graph: Graph, node: Node) -> frozenset[str]:
    """Every word under which a path may name this node."""
    kinds = {node.op}
    if WANTED not in node.attrs:  # autograd remembers calls of torch's own alone
        kinds.add(OVERLOADS.get(node.op, node.op))
    if op_named(node.op).pointwise:
        kinds.add(POINTWISE)
    if node.op in FUNCTIONS:
        kinds.add(ACTIVATION)
    if node.op.removesuffix("_grad") in FUNCTIONS and node.op not in FUNCTIONS:
        kinds.add(DERIVATIVE)
    if node.op == "sum_to" and node.types[0].numel == 1:
        kinds.add("sum_to.scalar")
    if len(node.inputs) == 2:
        first, second = (graph.types[value] for value in node.inputs)
        if second.numel == 1:
            kinds.add(f"{node.op}.scalar")
        elif second.shape == first.shape:
            kinds.add(f"{node.op}.tensor")
        else:
            kinds.add(f"{node.op}.broadcast")
    return frozenset(kinds)


def groups_from(graph: Graph, node: Node, fusion: Fusion) -> Iterator[tuple[str, ...]]:
    """Each matched beginning, of two or more nodes, of the fusion's paths that start at `node`, and
    all that belongs to it.
    """
    seen: set[tuple[str, ...]] = set()
    for first, rest in fusion.starts:
        if not first.kinds & kinds_of(graph, node):
            continue
        for group in _extended(graph, _Found((node,), node), rest):
            for names in with_ends(graph, _with_others(graph, group, fusion.joining)):
                if len(names) > 1 and names not in seen:
                    seen.add(names)
                    yield names


@dataclass(frozen=True)
class _Found:
    """The nodes of a path so far, from whose `last` it goes on, and twigs with where they hang."""

    nodes: tuple[Node, ...]
    last: Node
    twigs: tuple[tuple[Node, Twig], ...] = ()


def _extended(graph: Graph, found: _Found, rest: tuple[Item | Twig, ...]) -> Iterator[_Found]:
    """What is `found` and everything it can grow to along the items that are left."""
    item, others = (rest[0], rest[1:]) if rest else (None, ())
    if isinstance(item, Twig):
        more = replace(found, twigs=(*found.twigs, (found.last, item)))
        yield from _extended(graph, more, others)
        return
    yield found
    if item is None or len(found.nodes) == LONGEST:
        return
    left = rest if item.repeats else others
    for path in _readers(graph, found.nodes, found.last, item.kinds):
        more = replace(found, nodes=(*found.nodes, *path), last=path[-1])
        yield from _extended(graph, more, left)
    if item.optional:
        yield from _extended(graph, found, others)


def _with_others(graph: Graph, found: _Found, joining: frozenset[str]) -> tuple[str, ...]:
    """A path's nodes, those of its twigs and those that join, in the order of the graph if there
    are such.
    """
    nodes = found.nodes
    for place, twig in found.twigs:
        nodes = _with_twig(graph, nodes, place, twig.kinds)
    if joining:
        nodes = _with_joining(graph, nodes, joining)
    names = tuple(node.name for node in nodes)
    return names if nodes == found.nodes else tuple(sorted(names, key=graph.positions.__getitem__))


def _with_twig(
    graph: Graph, nodes: tuple[Node, ...], place: Node, kinds: tuple[frozenset[str], ...]
) -> tuple[Node, ...]:
    """`nodes` and each whole chain of these kinds that hangs on the value of `place`."""
    first, *others = kinds
    for path in _readers(graph, nodes, place, first):
        more = (*nodes, *(node for node in path if node not in nodes))
        nodes = more if not others else _with_chain(graph, nodes, more, path[-1], others)
    return nodes


def _with_chain(
    graph: Graph,
    nodes: tuple[Node, ...],
    more: tuple[Node, ...],
    place: Node,
    kinds: list[frozenset[str]],
) -> tuple[Node, ...]:
    """`more` with the rest of a chain, or `nodes` if there is none."""
    whole = _with_twig(graph, more, place, tuple(kinds))
    return whole if whole != more else nodes


def _with_joining(graph: Graph, nodes: tuple[Node, ...], kinds: frozenset[str]) -> tuple[Node, ...]:
    """`nodes` and those of these kinds whose values they alone read, until none is left."""
    names, left, found = {node.name for node in nodes}, list(nodes), list(nodes)
    phase = phase_of(graph, nodes[0])
    while left:
        for maker in map(graph.producers.get, left.pop().inputs):
            if maker is None or maker.name in names:
                continue
            if not graph.passes(maker) and not kinds & kinds_of(graph, maker):
                continue
            if phase_of(graph, maker) == phase and _is_read_inside(graph, maker, names):
                names.add(maker.name)
                found.append(maker)
                left.append(maker)
    return tuple(found)


def _is_read_inside(graph: Graph, node: Node, names: set[str]) -> bool:
    """Whether none but these nodes read what the node makes."""
    return all(
        value not in graph.results and all(n.name in names for n in graph.consumers[value])
        for value in node.outputs
    )


def _readers(
    graph: Graph, group: tuple[Node, ...], last: Node, kinds: frozenset[str]
) -> list[tuple[Node, ...]]:
    """Nodes of these kinds outside of the group, of its phase, that read the value of its node
    `last`, each after the free casts through which it does, but for those of the group.
    """
    same = {member.name for member in group}
    backward = last.name in graph.backward_nodes
    found: list[tuple[Node, ...]] = []
    for reader in graph.consumers[last.name]:
        if (reader.name in graph.backward_nodes) != backward:
            continue
        inside = reader.name in same
        if not inside and kinds & kinds_of(graph, reader):
            found.append((reader,))
        elif graph.passes(reader):
            own = () if inside else (reader,)
            found += [(*own, *path) for path in _readers(graph, group, reader, kinds)]
    return found
