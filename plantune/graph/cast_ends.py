"""Extends groups of nodes by the casts of their inputs and results."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from plantune.graph.free_casts import widens
from plantune.graph.graph import Graph, Node
from plantune.graph.ops import op_named
from plantune.graph.ops.overload import CONCAT, SOFTMAX, OverloadOp
from plantune.graph.step import phase_of

Group = tuple[str, ...]
FUSED_OVERLOADS = (CONCAT, SOFTMAX)  # whose kernels of ours read any floats


def with_ends(graph: Graph, group: Group) -> Iterator[Group]:
    """The group alone, then with casts at its ends: with those of inputs that widen, or with all,
    and with those of results that nothing else reads, or with all. No family has to support each.
    """
    yield group
    if not graph.casts:
        return
    seen = {group}
    phase = phase_of(graph, graph.nodes[graph.positions[group[0]]])
    fronts = (_with_front(graph, group, phase, narrows=narrows) for narrows in (False, True))
    for front in dict.fromkeys((group, *fronts)):
        backs = (_with_back(graph, front, phase, beside=beside) for beside in (False, True))
        for names in (front, *backs):
            if names not in seen:
                seen.add(names)
                yield names


def cast_groups(graph: Graph, node: Node) -> Iterator[Group]:
    """A node alone with the casts at its ends."""
    for group in with_ends(graph, (node.name,)) if node.name not in graph.casts else ():
        if len(group) > 1:
            yield group


def _with_front(graph: Graph, group: Group, phase: str, *, narrows: bool) -> Group:
    """With the casts that only this group reads; also those that lose digits, if `narrows`."""
    names, left = {*group}, [*group]
    while left:
        for value in graph.nodes[graph.positions[left.pop()]].inputs:
            maker = graph.producers.get(value)
            if maker is None or maker.name in names or not graph.passes(maker):
                continue
            fits = widens(maker) or narrows
            if fits and phase_of(graph, maker) == phase and not _leaves(graph, value, names):
                names.add(maker.name)
                left.append(maker.name)
    return _sorted(graph, group, names)


def _with_back(graph: Graph, group: Group, phase: str, *, beside: bool) -> Group:
    """With the casts of the group's results: of those that one cast alone reads outside, or
    `beside` other readers.
    """
    names = {*group}
    values = [v for name in group for v in graph.nodes[graph.positions[name]].outputs]
    while values:
        value = values.pop()
        outside = [node for node in graph.consumers[value] if node.name not in names]
        casts = [
            node
            for node in outside
            if node.name in graph.casts
            and phase_of(graph, node) == phase
            and not _is_left_to_reader(graph, node, phase)
        ]
        alone = len(outside) == 1 and value not in graph.results
        if casts and (alone or beside):
            names.update(node.name for node in casts)
            values += [node.name for node in casts]
    return _sorted(graph, group, names)


def _is_left_to_reader(graph: Graph, cast: Node, phase: str) -> bool:
    """Whether a cast to more digits belongs to the step of the one node that reads it, as less is
    moved then. Torch's own ops take no casts.
    """
    readers = graph.consumers[cast.name]
    if not widens(cast) or cast.name in graph.results or len(readers) != 1:
        return False
    known = readers[0].op in FUSED_OVERLOADS or not isinstance(op_named(readers[0].op), OverloadOp)
    return known and phase_of(graph, readers[0]) == phase


def _leaves(graph: Graph, value: str, names: Collection[str]) -> bool:
    """Whether anything besides these nodes reads a value."""
    return value in graph.results or any(n.name not in names for n in graph.consumers[value])


def _sorted(graph: Graph, group: Group, names: Collection[str]) -> Group:
    if len(names) == len(group):
        return group
    return tuple(sorted(names, key=graph.positions.__getitem__))
