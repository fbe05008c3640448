"""The cheapest way to cover a graph with steps, when each step's candidates have a cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from plantune.errors import InvalidGraph
from plantune.graph.graph import Graph
from plantune.graph.partition import partition_into
from plantune.graph.step import Step
from plantune.graph.types import TensorType
from plantune.kernels.family import Candidate

# States kept per node. A graph that needs no more gets its best cover; training graphs keep many
# values alive, and with them many layouts to tell apart, so theirs is a good one. A narrow beam
# does for what to measure next.
BEAM, NARROW_BEAM = 256, 32


@dataclass(frozen=True)
class Option:
    """A step with one candidate: what it costs, the layouts that it demands and makes."""

    step: Step
    candidate: Candidate
    cost_us: float
    demands: Mapping[str, str]
    makes: Mapping[str, str]


Cover = tuple[Option, ...]


@dataclass(frozen=True)
class Conversion:
    """What it costs to bring a value into another layout, roughly."""

    launch_us: float
    bytes_per_us: float

    def time_us(self, type_: TensorType) -> float:
        return self.launch_us + 2 * type_.size_bytes / self.bytes_per_us


# By the kind of arch: two cores with AVX-512; an H200, 2026-11-20.
CONVERSIONS = {"cpu": Conversion(4.0, 8e3), "cuda": Conversion(2.5, 2e6)}


@dataclass(frozen=True)
class _State:
    """A partial cover: the nodes before some place, and some behind it that groups took along."""

    cost_us: float
    ahead: frozenset[str]
    layouts: tuple[tuple[str, str], ...]
    chosen: tuple[Option, ...]


_Slot = tuple[frozenset[str], tuple[tuple[str, str], ...], int]


def best_covers(
    graph: Graph,
    options: Iterable[Option],
    wanted: int,
    conversion: Conversion = CONVERSIONS["cpu"],
    beam: int = BEAM,
) -> list[tuple[float, Cover]]:
    """Up to `wanted` covers with their summed cost, the cheapest first.

    Every node is covered by exactly one option, groups that would wait for each other are left out.
    Constant nodes need no option: they run when a weight changes, not in every call.
    """
    starts = _cheapest_by_first_node(options)
    last_use = _last_uses(graph)
    states = [_State(0.0, frozenset(), _edge_layouts(graph), ())]
    for place, node in enumerate(graph.nodes):
        grown: dict[_Slot, _State] = {}
        for state in states:
            here = starts.get(node.name, ())
            for following in _grown(graph, state, node.name, here, conversion):
                _keep(grown, _forget(following, place, last_use), wanted)
        states = sorted(grown.values(), key=lambda state: state.cost_us)[: beam * wanted]
    return _runnable(graph, states, wanted)


def _cheapest_by_first_node(options: Iterable[Option]) -> dict[str, list[Option]]:
    """Of options that cover the same nodes in the same layouts only the cheapest can win."""
    best: dict[tuple[object, ...], Option] = {}
    for option in options:
        nodes = tuple(node.name for node in option.step.nodes)
        key = (nodes, tuple(sorted(option.demands.items())), tuple(sorted(option.makes.items())))
        if key not in best or option.cost_us < best[key].cost_us:
            best[key] = option
    starts: dict[str, list[Option]] = {}
    for option in best.values():
        starts.setdefault(option.step.name, []).append(option)
    return starts


def _grown(
    graph: Graph, state: _State, node: str, options: Sequence[Option], conversion: Conversion
) -> Iterable[_State]:
    """The state after `node`: it is covered already, constant, or starts one of the options."""
    if node in state.ahead:
        yield _State(state.cost_us, state.ahead - {node}, state.layouts, state.chosen)
        return
    if not options and node in graph.constants:
        yield state
        return
    layouts = dict(state.layouts)
    for option in options:
        later = frozenset(member.name for member in option.step.nodes[1:])
        if not state.ahead.isdisjoint(later):
            continue
        cost = state.cost_us + option.cost_us
        after = dict(layouts)
        for name, layout in option.demands.items():
            if layouts.get(name, layout) != layout:
                cost += conversion.time_us(graph.types[name])
        after.update(option.makes)
        yield _State(
            cost, state.ahead | later, tuple(sorted(after.items())), (*state.chosen, option)
        )


def _forget(state: _State, place: int, last_use: Mapping[str, int]) -> _State:
    """Layouts of values that nothing reads any more make no difference."""
    live = tuple(pair for pair in state.layouts if last_use.get(pair[0], -1) > place)
    return _State(state.cost_us, state.ahead, live, state.chosen)


def _keep(
    grown: dict[_Slot, _State],
    state: _State,
    wanted: int,
) -> None:
    """Several covers may end in the same state; the `wanted` cheapest of them stay."""
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
        groups = [[node.name for node in option.step.nodes] for option in state.chosen]
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
