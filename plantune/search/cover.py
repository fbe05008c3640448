"""The cheapest ways to cover a graph with steps whose candidates have costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from plantune.errors import InvalidGraph
from plantune.graph import Graph, TensorType
from plantune.graph.partition import partition_into
from plantune.search.candidates import StepCandidate

# States kept per node. A graph that needs no more gets its best cover. Training graphs keep many
# values alive, so they have many layouts to tell apart, and get a good one. A narrow beam is enough
# to decide what to measure next.
BEAM, NARROW_BEAM = 256, 32
Cover = tuple[StepCandidate, ...]
Priced = tuple[StepCandidate, float]


@dataclass(frozen=True)
class Conversion:
    """What it costs to change the layout of a value, roughly."""

    launch_us: float
    bytes_per_us: float

    def time_us(self, type_: TensorType) -> float:
        return self.launch_us + 2 * type_.size_bytes / self.bytes_per_us


# By the kind of arch: two cores with AVX-512; an H200, 2026-11-20.
CONVERSIONS = {"cpu": Conversion(4.0, 8e3), "cuda": Conversion(2.5, 2e6)}


@dataclass(frozen=True)
class _State:
    """A partial cover: all nodes up to some place, and those `ahead` that its groups include."""

    cost_us: float
    ahead: frozenset[str]
    layouts: tuple[tuple[str, str], ...]
    chosen: Cover


_Slot = tuple[frozenset[str], tuple[tuple[str, str], ...], int]


def best_covers(
    graph: Graph,
    candidates: Iterable[Priced],
    wanted: int,
    conversion: Conversion = CONVERSIONS["cpu"],
    beam: int = BEAM,
) -> list[tuple[float, Cover]]:
    """Up to `wanted` covers with their summed cost, the cheapest first.

    Every node is covered by exactly one candidate, and no two groups wait for each other. Constant
    nodes need no candidate: they run when a weight changes, not in every call.
    """
    starts = _cheapest_by_first_node(candidates)
    last_use = _last_uses(graph)
    states = [_State(0.0, frozenset(), _edge_layouts(graph), ())]
    for place, node in enumerate(graph.nodes):
        grown: dict[_Slot, _State] = {}
        for state in states:
            starting = starts.get(node.name, ())
            for following in _grown(graph, state, node.name, starting, conversion):
                _keep(grown, _forget(following, place, last_use), wanted)
        states = sorted(grown.values(), key=lambda state: state.cost_us)[: beam * wanted]
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


def _grown(
    graph: Graph, state: _State, node: str, starting: Sequence[Priced], conversion: Conversion
) -> Iterable[_State]:
    """The states after `node`: covered already, constant, or the first of a candidate's nodes."""
    if node in state.ahead:
        yield _State(state.cost_us, state.ahead - {node}, state.layouts, state.chosen)
        return
    if not starting and node in graph.constants:
        yield state
        return
    layouts = dict(state.layouts)
    for candidate, cost_us in starting:
        later = frozenset(candidate.nodes[1:])
        if not state.ahead.isdisjoint(later):
            continue
        cost = state.cost_us + cost_us
        for name, layout in candidate.demands.items():
            if layouts.get(name, layout) != layout:
                cost += conversion.time_us(graph.types[name])
        after = tuple(sorted({**layouts, **candidate.makes}.items()))
        yield _State(cost, state.ahead | later, after, (*state.chosen, candidate))


def _forget(state: _State, place: int, last_use: Mapping[str, int]) -> _State:
    """The state without the layouts of values that nothing reads any more."""
    live = tuple(pair for pair in state.layouts if last_use.get(pair[0], -1) > place)
    return _State(state.cost_us, state.ahead, live, state.chosen)


def _keep(grown: dict[_Slot, _State], state: _State, wanted: int) -> None:
    """Several covers may lead to the same state; the `wanted` cheapest of them stay."""
    slots = [(state.ahead, state.layouts, rank) for rank in range(wanted)]
    for slot in slots:
        if slot not in grown:
            grown[slot] = state
            return
    worst = max(slots, key=lambda slot: grown[slot].cost_us)
    if state.cost_us < grown[worst].cost_us:
        grown[worst] = state


def _edge_layouts(graph: Graph) -> tuple[tuple[str, str], ...]:
    sources = [*graph.inputs, *graph.output_gradients]
    return tuple(sorted((name, type_.layout) for name, type_ in sources))


def _last_uses(graph: Graph) -> dict[str, int]:
    """The place of the last node that reads each image; other values have one layout."""
    uses: dict[str, int] = {}
    for place, node in enumerate(graph.nodes):
        for value in node.inputs:
            if len(graph.types[value].shape) == 4 and value not in graph.constants:
                uses[value] = place
    return uses


def _runnable(graph: Graph, states: Sequence[_State], wanted: int) -> list[tuple[float, Cover]]:
    found: list[tuple[float, Cover]] = []
    for state in states:
        groups = [list(candidate.nodes) for candidate in state.chosen]
        covered = {name for group in groups for name in group}
        groups += [[node.name] for node in graph.nodes if node.name not in covered]
        try:
            partition_into(graph, groups)
        except InvalidGraph:
            continue
        found.append((state.cost_us, state.chosen))
        if len(found) == wanted:
            break
    return found
