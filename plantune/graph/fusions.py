"""Fusions: which ops may share a step, read from `search_spaces/fusions.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from plantune.errors import InvalidSearchSpace
from plantune.graph.graph import Graph, Node
from plantune.graph.ops import OPS, op_named
from plantune.graph.ops.functions import FUNCTIONS
from plantune.paths import data_folder

POINTWISE, ACTIVATION = "pointwise", "activation"
OPERANDS = ("scalar", "tensor", "broadcast")
# Repeating items on a graph that branches would offer exponentially many groups.
LONGEST = 24


@dataclass(frozen=True)
class Item:
    """One place of a path: what matches, whether it may be missing or repeat, and whether the item
    after it reads on from the value before it.
    """

    kinds: frozenset[str]
    optional: bool
    repeats: bool
    branches: bool = False


@dataclass(frozen=True)
class Fusion:
    name: str
    path: tuple[Item, ...]


def parse_item(text: str, where: str) -> Item:
    """The item of one string such as `add.scalar|add_channel?`."""
    optional, repeats, branches = text.endswith("?"), text.endswith("*"), text.startswith("&")
    kinds = frozenset(text.removeprefix("&").removesuffix("?").removesuffix("*").split("|"))
    for kind in kinds:
        op, _, operand = kind.partition(".")
        if op not in OPS and kind not in (POINTWISE, ACTIVATION):
            raise InvalidSearchSpace(f"{where}: {kind!r} names no op; see plantune.graph.ops")
        if operand and (operand not in OPERANDS or OPS[op].arity != 2):
            raise InvalidSearchSpace(f"{where}: {kind!r}: {op} has no operand {operand!r}")
    return Item(kinds, optional or repeats, repeats, branches)


def load_fusions(path: Path) -> tuple[Fusion, ...]:
    """All fusions of one file; raises InvalidSearchSpace naming the place of a fault."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidSearchSpace(f"{path}: cannot be read: {error}") from error
    fusions = []
    for name, table in tables.items():
        where = f"{path}: [{name}]"
        items = table["path"] if isinstance(table, dict) and set(table) == {"path"} else []
        strings = isinstance(items, list) and all(isinstance(item, str) for item in items)
        if not strings or len(items) < 2:
            raise InvalidSearchSpace(f"{where}: needs one `path` of two or more strings")
        parsed = tuple(parse_item(item, where) for item in items)
        if parsed[0].optional:
            raise InvalidSearchSpace(f"{where}: the first item of a path cannot be optional")
        if parsed[0].branches:
            raise InvalidSearchSpace(f"{where}: the first item of a path cannot branch off")
        fusions.append(Fusion(name, parsed))
    return tuple(fusions)


@cache
def all_fusions() -> tuple[Fusion, ...]:
    """The fusions that plantune ships."""
    return load_fusions(data_folder("search_spaces") / "fusions.toml")


def fusions_named(*names: str) -> tuple[Fusion, ...]:
    """Some of the shipped fusions; raises InvalidSearchSpace for an unknown name."""
    known = {fusion.name: fusion for fusion in all_fusions()}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InvalidSearchSpace(f"no fusion is called {unknown}; known: {', '.join(known)}")
    return tuple(known[name] for name in names)


def kinds_of(graph: Graph, node: Node) -> frozenset[str]:
    """Every word under which a path may name this node."""
    kinds = {node.op}
    if op_named(node.op).pointwise:
        kinds.add(POINTWISE)
    if node.op in FUNCTIONS:
        kinds.add(ACTIVATION)
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
    """Each matched beginning, of two or more nodes, of the fusion's paths that start at `node`."""
    first, *rest = fusion.path
    if first.kinds & kinds_of(graph, node):
        seen: set[tuple[str, ...]] = set()
        for group in _extended(graph, (node,), node, tuple(rest)):
            names = tuple(member.name for member in group)
            if len(names) > 1 and names not in seen:
                seen.add(names)
                yield names


def _extended(
    graph: Graph, group: tuple[Node, ...], last: Node, rest: tuple[Item, ...]
) -> Iterator[tuple[Node, ...]]:
    """`group` and everything it can grow to along the items that are left, from `last` on."""
    yield group
    if not rest or len(group) == LONGEST:
        return
    item, *others = rest
    left = rest if item.repeats else tuple(others)
    for reader in _readers(graph, group, last):
        if item.kinds & kinds_of(graph, reader):
            after = last if item.branches else reader
            yield from _extended(graph, (*group, reader), after, left)
    if item.optional:
        yield from _extended(graph, group, last, tuple(others))


def _readers(graph: Graph, group: tuple[Node, ...], last: Node) -> list[Node]:
    """Nodes outside of the group, of its phase, that read the value of its node `last`."""
    same = {member.name for member in group}
    backward = last.name in graph.backward_nodes
    return [
        reader
        for reader in graph.consumers[last.name]
        if reader.name not in same and (reader.name in graph.backward_nodes) == backward
    ]
