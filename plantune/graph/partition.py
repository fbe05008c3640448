"""A partition of the graph into steps: it is the fusion choice."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from plantune.errors import InvalidGraph
from plantune.graph.cast_ends import cast_groups
from plantune.graph.fusions import Fusion, groups_from
from plantune.graph.graph import Graph, Node
from plantune.graph.step import PHASES, Step, make_step, phase_of

Group = tuple[str, ...]
Partition = tuple[Step, ...]
WAITS = "it would wait for a step that waits for it"


def partition_into(graph: Graph, groups: Iterable[Collection[str]]) -> Partition:
    """The steps that cover `groups`, in an order in which they can run.

    Every node must be in exactly one group and every group of one phase; groups that wait for each
    other are refused with InvalidGraph.
    """
    steps = [make_step(graph, group) for group in groups]
    covered = [node.name for step in steps for node in step.nodes]
    twice = {name for name, times in Counter(covered).items() if times > 1}
    missing = {node.name for node in graph.nodes} - set(covered)
    if twice or missing:
        raise InvalidGraph(f"nodes covered twice: {sorted(twice)}; not covered: {sorted(missing)}")
    order = _runnable_order(graph, [[node.name for node in step.nodes] for step in steps])
    if order is None:
        raise InvalidGraph("these steps wait for each other, so they cannot run one by one")
    return tuple(steps[index] for index in order)


def one_by_one(graph: Graph) -> Partition:
    """Each op a step of its own."""
    return partition_into(graph, [(node.name,) for node in graph.nodes])


def fused(
    graph: Graph, fusions: Sequence[Fusion], admits: Callable[[Step], bool] = lambda step: True
) -> Partition:
    """The greedy partition: at each node in order, the largest group that `admits` takes."""
    taken = Chosen(graph)
    covered = taken.group_of
    offers = _offers(graph, fusions)
    for node in graph.nodes:
        if node.name in covered:
            continue
        group = next(
            (
                offer
                for offer in sorted(offers.get(node.name, ()), key=len, reverse=True)
                if covered.keys().isdisjoint(offer)
                and why_not_group(graph, offer, taken) is None
                and admits(make_step(graph, offer))
            ),
            (node.name,),
        )
        taken.add(group)
    return partition_into(graph, dict.fromkeys(covered.values()))


def _offers(graph: Graph, fusions: Sequence[Fusion]) -> dict[str, list[Group]]:
    """The groups that fusions offer, by the node of each that stands first in the graph."""
    offers: dict[str, list[Group]] = {}
    for node in graph.nodes:
        for group in _groups(graph, node, fusions):
            first = min(group, key=graph.positions.__getitem__)
            offers.setdefault(first, []).append(group)
    return offers


def _groups(graph: Graph, node: Node, fusions: Sequence[Fusion]) -> Iterator[Group]:
    """All groups of two nodes or more that begin with a node: it and its casts, and fusions."""
    yield from cast_groups(graph, node)
    for fusion in fusions:
        yield from groups_from(graph, node, fusion)


def alternatives(graph: Graph, fusions: Sequence[Fusion]) -> tuple[Step, ...]:
    """Every step that a partition may use: each op alone, and each group that a fusion offers."""
    groups: dict[frozenset[str], Group] = {frozenset((n.name,)): (n.name,) for n in graph.nodes}
    for node in graph.nodes:
        for group in _groups(graph, node, fusions):
            if frozenset(group) not in groups and why_not_group(graph, group) is None:
                groups[frozenset(group)] = group
    return tuple(make_step(graph, group) for group in groups.values())


class Chosen:
    """Groups that are chosen already, each by its nodes."""

    def __init__(self, graph: Graph, groups: Iterable[Group] = ()) -> None:
        self.group_of: dict[str, Group] = {}
        self._positions = graph.positions
        # By position: where the first group begins that has nodes up to there and nodes after it.
        self._begins: dict[int, int] = {}
        for group in groups:
            self.add(group)

    def add(self, group: Group) -> None:
        self.group_of.update(dict.fromkeys(group, group))
        places = [self._positions[name] for name in group]
        begin = min(places)
        for place in range(begin, max(places)):
            self._begins[place] = min(begin, self._begins.get(place, begin))

    def reach(self, place: int) -> int:
        """The first position on which nodes from this one on can depend by way of a node after it:
        groups stand wholly before it, or wholly from it on.
        """
        reach = self._begins.get(place, place)
        while (earlier := self._begins.get(reach - 1, reach)) < reach:
            reach = earlier
        return reach


def why_not_group(
    graph: Graph, group: Collection[str], others: Iterable[Group] | Chosen = ()
) -> str | None:
    """Why these nodes cannot be one step beside the `others`, or None if they can."""
    nodes = [graph.nodes[graph.positions[name]] for name in group]
    phases = {phase_of(graph, node) for node in nodes}
    if len(phases) > 1:
        return f"its nodes run in several phases: {', '.join(sorted(phases))}"
    chosen = others if isinstance(others, Chosen) else Chosen(graph, others)
    return WAITS if _waits_for_itself(graph, nodes, chosen) else None


def _waits_for_itself(graph: Graph, nodes: Sequence[Node], chosen: Chosen) -> bool:
    """Whether a node of a group reads, by way of others outside of it, what the group makes. A node
    of a chosen group runs when all of that can.

    Nodes stand in an order in which they can run: only those from the reach of the group's first on
    matter.
    """
    inside, seen = {node.name for node in nodes}, set[str]()
    reach = chosen.reach(min(graph.positions[name] for name in inside))
    left = [maker for node in nodes for maker in graph.makers(node) if maker.name not in inside]
    while left:
        node = left.pop()
        if node.name in inside:
            return True
        if node.name in seen or graph.positions[node.name] < reach:
            continue
        for name in chosen.group_of.get(node.name, (node.name,)):
            seen.add(name)
            left += graph.makers(graph.nodes[graph.positions[name]])
    return False


def _runnable_order(graph: Graph, groups: Sequence[Collection[str]]) -> list[int] | None:
    """Indices of the groups in topological order, None if they form a cycle.

    Phases run one after the other; within a phase ties go to the group that starts first.
    """
    position = graph.positions
    group_of = {name: index for index, group in enumerate(groups) for name in group}
    waits: list[set[int]] = [set() for _ in groups]
    frees: list[set[int]] = [set() for _ in groups]
    for node in graph.nodes:
        mine = group_of[node.name]
        for maker in graph.makers(node):
            if group_of[maker.name] != mine:
                waits[mine].add(group_of[maker.name])
                frees[group_of[maker.name]].add(mine)

    def priority(index: int) -> tuple[int, int]:
        first = min(position[name] for name in groups[index])
        return (PHASES.index(phase_of(graph, graph.nodes[first])), first)

    ready = [(*priority(index), index) for index, missing in enumerate(waits) if not missing]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        index = heapq.heappop(ready)[-1]
        order.append(index)
        for later in frees[index]:
            waits[later].discard(index)
            if not waits[later]:
                heapq.heappush(ready, (*priority(later), later))
    return order if len(order) == len(groups) else None
