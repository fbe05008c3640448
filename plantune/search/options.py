"""Which steps and candidates a search considers, and what is known or guessed of their cost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from plantune.canonical import digest
from plantune.graph.fusions import Fusion
from plantune.graph.graph import Graph, Node
from plantune.graph.ops import op_named
from plantune.graph.partition import alternatives
from plantune.graph.step import Step
from plantune.kernels.family import Candidate
from plantune.kernels.registry import candidates, estimate_us, family_named
from plantune.measure.outcome import Measured, Outcome
from plantune.search.cover import Option
from plantune.space.arch import Arch
from plantune.space.search_space import SearchSpace

FRAMEWORK, VIEW = "framework", "view"
LONG_BUILD_S = 3.0


@dataclass(frozen=True)
class Try:
    """A candidate for a step: what can be measured. Equal steps share it by their signature.

    Without `arch` it is guessed for the machines on which its family's constants were measured.
    """

    step: Step
    candidate: Candidate
    arch: Arch | None = None

    @cached_property
    def key(self) -> tuple[str, Candidate]:
        return (self.step.signature, self.candidate)

    @cached_property
    def guess_us(self) -> float:
        return estimate_us(self.step, self.candidate, self.arch)

    @cached_property
    def layouts(self) -> Mapping[str, str]:
        return family_named(self.candidate.family).layouts(self.step, self.candidate.config)

    @cached_property
    def kin(self) -> tuple[str, ...]:
        """Equal for candidates whose configs do the same at kindred steps: those whose heaviest op
        is the same, in the same layouts.
        """
        values = (*self.step.inputs, *self.step.outputs)
        return (
            kin_of(self.step),
            self.candidate.family,
            *(self.layouts.get(name, "") for name, type_ in values if len(type_.shape) == 4),
        )


_heaviest: dict[str, int] = {}


def heaviest(step: Step) -> Node:
    """The node with the most arithmetic."""

    def flops(node: Node) -> int:
        types = [step.types[value] for value in node.inputs]
        return op_named(node.op).flops(types, node.types, node.attrs)

    if step.signature not in _heaviest:
        _heaviest[step.signature] = step.nodes.index(max(step.nodes, key=flops))
    return step.nodes[_heaviest[step.signature]]


_kin: dict[str, str] = {}


def kin_of(step: Step) -> str:
    """Equal for steps whose heaviest op is the same: fusions around one convolution are kin."""
    if step.signature not in _kin:
        node = heaviest(step)
        types = [step.types[value].to_json() for value in (*node.inputs, *node.outputs)]
        _kin[step.signature] = digest([node.op, dict(node.attrs), types])
    return _kin[step.signature]


def tries(graph: Graph, space: SearchSpace, fusions: Iterable[Fusion]) -> tuple[Try, ...]:
    """Everything that may run in a pass.

    The framework fuses nothing, so it is tried op by op. What takes long to build is tried for the
    largest groups only: it would hardly be built again for a part of one.
    """
    steps = [s for s in alternatives(graph, tuple(fusions)) if s.phase != "refresh"]
    arch = space.arch
    found = [Try(step, candidate, arch) for step in steps for candidate in candidates(step, space)]
    largest = _largest(
        [t for t in found if family_named(t.candidate.family).build_s >= LONG_BUILD_S]
    )
    return tuple(t for t in found if _is_worth_it(t, largest))


def _is_worth_it(tried: Try, largest: set[tuple[str, frozenset[str]]]) -> bool:
    name = tried.candidate.family
    if name == FRAMEWORK:
        return len(tried.step.nodes) == 1
    return family_named(name).build_s < LONG_BUILD_S or _group(tried) in largest


def _group(tried: Try) -> tuple[str, frozenset[str]]:
    return tried.candidate.family, frozenset(node.name for node in tried.step.nodes)


def _largest(found: Iterable[Try]) -> set[tuple[str, frozenset[str]]]:
    """The groups that are no part of another group which the same family runs."""
    groups = {_group(tried) for tried in found}
    return {
        (family, nodes)
        for family, nodes in groups
        if not any(family == other and nodes < more for other, more in groups)
    }


class Costs:
    """Measured times where there are any, else guesses scaled by what they turned out elsewhere.

    A `hope` below 1 makes guesses look better than they are, so that more of them get measured.
    """

    def __init__(self) -> None:
        self.hope = 1.0
        self.outcomes: dict[tuple[str, Candidate], Outcome] = {}
        # By family and heaviest op.
        self._ratios: dict[tuple[str, str], list[float]] = {}
        self._least: dict[str, float] = {}
        self._fastest: dict[str, float] = {}
        self._kin_ratios: dict[tuple[tuple[str, ...], Candidate], float] = {}

    def learn(self, tried: Try, outcome: Outcome) -> None:
        self.outcomes[tried.key] = outcome
        if isinstance(outcome, Measured):
            signature = tried.step.signature
            self._fastest[signature] = min(self.fastest_us(tried.step), outcome.median_us)
            ratio = outcome.median_us / tried.guess_us
            family = tried.candidate.family
            self._ratios.setdefault((family, heaviest(tried.step).op), []).append(ratio)
            self._least[family] = min(self._least.get(family, ratio), ratio)
            self._kin_ratios[tried.kin, tried.candidate] = ratio

    def knows(self, tried: Try) -> bool:
        return tried.key in self.outcomes

    def fastest_us(self, step: Step) -> float:
        """The best that is known of any candidate of a step; infinite where none was measured."""
        return self._fastest.get(step.signature, math.inf)

    def of(self, tried: Try) -> float:
        """Microseconds; infinite for what was rejected."""
        outcome = self.outcomes.get(tried.key)
        if outcome is None or (_runs_anyway(tried) and _says_nothing(outcome)):
            return self.hope * tried.guess_us * self._scale(tried)
        return outcome.median_us if isinstance(outcome, Measured) else math.inf

    def _scale(self, tried: Try) -> float:
        """How far off guesses were: those for this config at kindred steps, else those for the op,
        else the family's; hopeful, so that good candidates get measured.
        """
        kin = self._kin_ratios.get((tried.kin, tried.candidate))
        if kin is not None:
            return kin
        family = tried.candidate.family
        seen = self._ratios.get((family, heaviest(tried.step).op))
        return statistics.median_low(seen) if seen else self._least.get(family, 1.0)


def _runs_anyway(tried: Try) -> bool:
    return tried.candidate.family in (FRAMEWORK, VIEW)


def _says_nothing(outcome: Outcome) -> bool:
    """Whether the machine was to blame, not the candidate."""
    return not isinstance(outcome, Measured) and outcome.stage == "noisy"


def options(all_tries: Iterable[Try], costs: Costs, *, known_only: bool) -> Iterator[Option]:
    """The tries as options of a cover; those that were rejected are none.

    With `known_only` a guess counts for the framework alone, which runs whatever it costs.
    """
    for tried in all_tries:
        cost = costs.of(tried)
        sure = costs.knows(tried) or tried.candidate.family in (FRAMEWORK, VIEW)
        if math.isfinite(cost) and (sure or not known_only):
            yield _option(tried, cost)


def _option(tried: Try, cost_us: float) -> Option:
    step = tried.step
    layouts = tried.layouts
    inputs = {name for name, type_ in step.inputs if len(type_.shape) == 4}
    outputs = {name for name, type_ in step.outputs if len(type_.shape) == 4}
    demands: Mapping[str, str] = {
        name: layout for name, layout in layouts.items() if name in inputs - step.constants
    }
    makes = {name: layouts.get(name, "nchw") for name in outputs}
    return Option(step, tried.candidate, cost_us, demands, makes)
