"""The cheapest ways to cover a graph with steps whose candidates have costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import attrgetter, or_
from typing import NamedTuple

from plantune.errors import InvalidGraph
from plantune.graph import Graph
from plantune.graph.partition import partition_into
from plantune.kernels.conversions import ConversionCost
from plantune.plans.planner.candidates import StepCandidate

# States kept per node. A graph that needs no more gets its best cover. Training graphs keep many
# values alive, so they have many layouts to tell apart, and get a good one. A narrow beam is enough
# to decide what to measure next.
BEAM, NARROW_BEAM = 256, 32
# Of a deep graph in all: the four best covers of ResNet-50 in training, 459 nodes, cost the same
# with 64 states a node, found in a fifth of the time.
MOST_STATES = 1 << 15
Cover = tuple[StepCandidate, ...]
Priced = tuple[StepCandidate, float]


class _State(NamedTuple):
    """A partial cover: all nodes up to some place, and those `ahead` that its groups include. Sets
    of nodes and of layouts are the bits of a number: a deep network's have hundreds of members.

    States are compared by `rank_us`, the cost without the least that the nodes ahead would take: a
    group of twenty nodes would else look dear beside one that has done two of them.
    """

    cost_us: float
    rank_us: float
    ahead: int
    layouts: int
    # The last candidate, after those before it.
    chosen: _Chosen | None


class _Chosen(NamedTuple):
    last: StepCandidate
    before: _Chosen | None


class _Option(NamedTuple):
    """A candidate that a state may grow by: the nodes after its first, the least that these take,
    and the layouts of what it makes, among all of those `values`. A demand is met by its layout or
    if none is known, else it costs a conversion.
    """

    item: StepCandidate
    cost_us: float
    least_us: float
    later: int
    demands: tuple[tuple[int, int, float], ...]
    values: int
    makes: int


class _Layouts:
    """A bit for each layout of each value."""

    def __init__(self) -> None:
        self._bits: dict[tuple[str, str], int] = {}
        self._of_value: dict[str, int] = {}

    def bit(self, name: str, layout: str) -> int:
        key = (name, layout)
        if key not in self._bits:
            self._bits[key] = 1 << len(self._bits)
            self._of_value[name] = self._of_value.get(name, 0) | self._bits[key]
        return self._bits[key]

    def of(self, names: Iterable[str]) -> int:
        """All layouts of these values."""
        return reduce(or_, (self._of_value.get(name, 0) for name in names), 0)


def beam_for(graph: Graph) -> int:
    """States a node for the covers that are ranked."""
    return max(min(BEAM, MOST_STATES // max(len(graph.nodes), 1)), NARROW_BEAM)


def best_covers(
    graph: Graph,
    candidates: Iterable[Priced],
    wanted: int,
    conversion: ConversionCost,
    beam: int = BEAM,
) -> list[tuple[float, Cover]]:
    """Up to `wanted` covers with their summed cost, the cheapest first.

    Every node is covered by exactly one candidate, and no two groups wait for each other. Constant
    nodes need no candidate: they run when a weight changes, not in every call.
    """
    known = _Layouts()
    sources = (*graph.inputs, *graph.output_gradients)
    edges = reduce(or_, (known.bit(name, type_.layout) for name, type_ in sources), 0)
    priced = _cheapest_by_first_node(candidates)
    shares = _least_shares(graph, priced)
    starts = _options(graph, priced, shares, conversion, known)
    states = [_State(0.0, 0.0, 0, edges, None)]
    for place, (node, dead) in enumerate(zip(graph.nodes, _dead(graph, known), strict=True)):
        starting = starts.get(node.name, ())
        grown: dict[tuple[int, int], list[_State]] = {}
        for state in states:
            if state.ahead >> place & 1 or (not starting and node.name in graph.constants):
                share_us = shares.get(node.name, 0.0) if state.ahead >> place & 1 else 0.0
                passed = state._replace(rank_us=state.rank_us + share_us)
                _keep(grown, passed, state.ahead & ~(1 << place), state.layouts & ~dead, wanted)
                continue
            for option in starting:
                if not state.ahead & option.later:
                    layouts = state.layouts & ~option.values | option.makes
                    ahead = state.ahead | option.later
                    _keep(grown, _with(state, option), ahead, layouts & ~dead, wanted)
        found = (state for slot in grown.values() for state in slot)
        states = sorted(found, key=attrgetter("rank_us"))[: beam * wanted]
    return _runnable(graph, states, wanted)


def _cheapest_by_first_node(candidates: Iterable[Priced]) -> dict[str, list[Priced]]:
    """Of candidates that cover the same nodes in the same layouts only the cheapest can win."""
    best: dict[tuple[object, ...], Priced] = {}
    for item, cost_us in candidates:
        layouts = (tuple(sorted(part.items())) for part in (item.demands, item.makes))
        key = (item.nodes, *layouts)
        if key not in best or cost_us < best[key][1]:
            best[key] = (item, cost_us)
    starts: dict[str, list[Priced]] = {}
    for item, cost_us in best.values():
        starts.setdefault(item.step.name, []).append((item, cost_us))
    return starts


def _least_shares(graph: Graph, starts: Mapping[str, Sequence[Priced]]) -> dict[str, float]:
    """For each node the least that any candidate takes for it. What a group takes is divided among
    its nodes by what each of them would take alone.
    """
    rows = [(item, us) for row in starts.values() for item, us in row if math.isfinite(us)]
    alone: dict[str, float] = {}
    for item, us in rows:
        if len(item.nodes) == 1:
            alone[item.nodes[0]] = min(us, alone.get(item.nodes[0], us))
    shares = dict(alone)
    for item, us in rows:
        parts = [alone.get(name, 0.0) for name in item.nodes]
        for name, part in zip(item.nodes, parts, strict=True):
            shares[name] = min(shares.get(name, us), us * part / (sum(parts) or 1.0))
    return shares


def _options(
    graph: Graph,
    starts: Mapping[str, Sequence[Priced]],
    shares: Mapping[str, float],
    conversion: ConversionCost,
    known: _Layouts,
) -> dict[str, list[_Option]]:
    """The candidates by their first node."""
    # All bits first: what a value may have is known only then.
    parts = [part for row in starts.values() for c, _ in row for part in (c.demands, c.makes)]
    for name, layout in (pair for part in parts for pair in part.items()):
        known.bit(name, layout)

    def option(item: StepCandidate, cost_us: float) -> _Option:
        later = reduce(or_, (1 << graph.positions[name] for name in item.nodes[1:]), 0)
        demands = tuple(
            (known.of([name]), known.bit(name, layout), conversion.time_us(graph.types[name]))
            for name, layout in item.demands.items()
        )
        makes = reduce(or_, (known.bit(*pair) for pair in item.makes.items()), 0)
        least_us = sum(shares.get(name, 0.0) for name in item.nodes[1:])
        return _Option(item, cost_us, least_us, later, demands, known.of(item.makes), makes)

    return {name: [option(*priced) for priced in row] for name, row in starts.items()}


def _with(state: _State, option: _Option) -> _State:
    """The state with a candidate, and with the cost of the conversions that it needs."""
    us = option.cost_us
    for values, layout, conversion_us in option.demands:
        if state.layouts & values and not state.layouts & layout:
            us += conversion_us
    chosen = _Chosen(option.item, state.chosen)
    return _State(state.cost_us + us, state.rank_us + us - option.least_us, 0, 0, chosen)


def _keep(
    grown: dict[tuple[int, int], list[_State]], state: _State, ahead: int, layouts: int, wanted: int
) -> None:
    """Several covers may lead to the same state; the `wanted` cheapest of them stay."""
    slot = grown.setdefault((ahead, layouts), [])
    kept = _State(state.cost_us, state.rank_us, ahead, layouts, state.chosen)
    if len(slot) < wanted:
        slot.append(kept)
        return
    worst = max(range(wanted), key=lambda rank: slot[rank].cost_us)
    if state.cost_us < slot[worst].cost_us:
        slot[worst] = kept


def _dead(graph: Graph, known: _Layouts) -> Iterator[int]:
    """After each node, the layouts of values that nothing reads any more. Values other than images
    have one layout.
    """
    uses: dict[str, int] = {}
    for place, node in enumerate(graph.nodes):
        for value in node.inputs:
            if len(graph.types[value].shape) == 4 and value not in graph.constants:
                uses[value] = place
    last: dict[int, list[str]] = {}
    for name, place in uses.items():
        last.setdefault(place, []).append(name)
    never = known.of(name for name in graph.types if name not in uses)
    for place in range(len(graph.nodes)):
        yield never | known.of(last.get(place, ()))


def _runnable(graph: Graph, states: Sequence[_State], wanted: int) -> list[tuple[float, Cover]]:
    found: list[tuple[float, Cover]] = []
    for state in states:
        cover = _in_order(state)
        groups = [list(candidate.nodes) for candidate in cover]
        covered = {name for group in groups for name in group}
        groups += [[node.name] for node in graph.nodes if node.name not in covered]
        try:
            partition_into(graph, groups)
        except InvalidGraph:
            continue
        found.append((state.cost_us, cover))
        if len(found) == wanted:
            break
    return found


def _in_order(state: _State) -> Cover:
    found, chosen = [], state.chosen
    while chosen is not None:
        found.append(chosen.last)
        chosen = chosen.before
    return tuple(reversed(found))
