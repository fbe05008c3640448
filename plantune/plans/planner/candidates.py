"""The candidates of a search: what may run each step that a plan for the graph could use."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from plantune.base.canonical import digest
from plantune.graph import Graph, Node, Step
from plantune.graph.fusions import all_fusions
from plantune.graph.graph import Named
from plantune.graph.ops import op_named
from plantune.graph.partition import alternatives
from plantune.kernels.family import AnyFamily, Candidate
from plantune.kernels.one_call import is_one_call
from plantune.kernels.registry import candidates, family_named
from plantune.kernels.resolved import ResolvedStep
from plantune.plans.checked_plan import check_plan
from plantune.plans.plan import Plan
from plantune.space import Arch, SearchSpace

FRAMEWORK, VIEW = "framework", "view"
LONG_BUILD_S = 3.0
Key = tuple[str, Candidate]
Cluster = tuple[str, ...]


@dataclass(frozen=True)
class StepCandidate:
    """A candidate for one step: what is measured. Equal steps share the outcome by their signature.

    Without `arch` its time is estimated for the machines on which the family's constants were
    measured. What follows from the key alone is read from its `twin`, one with the same key: of a
    ResNet's candidates two thirds have one.
    """

    step: Step
    candidate: Candidate
    arch: Arch | None = None
    twin: StepCandidate | None = field(default=None, compare=False, repr=False)

    @cached_property
    def key(self) -> Key:
        return self.twin.key if self.twin else (self.step.signature, self.candidate)

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.step.nodes)

    @cached_property
    def estimate_us(self) -> float:
        if self.twin:
            return self.twin.estimate_us
        return self.chosen.estimate_us(self.arch)

    @cached_property
    def family(self) -> AnyFamily:
        """Found once by its name."""
        return self.twin.family if self.twin else family_named(self.candidate.family)

    @cached_property
    def chosen(self) -> ResolvedStep:
        parts = self.family.parts(self.step)
        return ResolvedStep(self.step, self.candidate, self.family, parts)

    @property
    def build_s(self) -> float:
        return self.family.build_s

    @property
    def always_runs(self) -> bool:
        """The framework runs every op, and a view launches nothing."""
        return self.candidate.family in (FRAMEWORK, VIEW)

    @cached_property
    def _layouts(self) -> Mapping[str, str]:
        return self.family.layouts(self.chosen.parts, self.candidate.config)

    @cached_property
    def demands(self) -> Mapping[str, str]:
        """The layout in which it reads each image; constants are prepared in any."""
        images = set(_images(self.step.inputs)) - self.step.constants
        return {name: layout for name, layout in self._layouts.items() if name in images}

    @cached_property
    def makes(self) -> Mapping[str, str]:
        """The layout of each image that it writes."""
        return {name: self._layouts.get(name, "nchw") for name in _images(self.step.outputs)}

    @cached_property
    def cluster(self) -> Cluster:
        """Equal for candidates whose configs are comparable: of one family, in the same layouts, at
        steps that have the same heaviest op.
        """
        if self.twin:
            return self.twin.cluster
        images = _images((*self.step.inputs, *self.step.outputs))
        layouts = (self._layouts.get(name, "") for name in images)
        return (_heaviest_work(self.step), self.candidate.family, *layouts)


def _images(values: Named) -> list[str]:
    return [name for name, type_ in values if len(type_.shape) == 4]


_heaviest: dict[str, int] = {}
_work: dict[str, str] = {}


def heaviest_node(step: Step) -> Node:
    """The node with the most arithmetic."""

    def flops(node: Node) -> int:
        types = [step.types[value] for value in node.inputs]
        return op_named(node.op).flops(types, node.types, node.attrs)

    if step.signature not in _heaviest:
        _heaviest[step.signature] = step.nodes.index(max(step.nodes, key=flops))
    return step.nodes[_heaviest[step.signature]]


def _heaviest_work(step: Step) -> str:
    """Equal for steps whose heaviest node does the same: all fusions around one convolution."""
    if step.signature not in _work:
        node = heaviest_node(step)
        types = [step.types[value].to_json() for value in (*node.inputs, *node.outputs)]
        _work[step.signature] = digest([node.op, node.identity, types])
    return _work[step.signature]


def step_candidates(graph: Graph, space: SearchSpace) -> tuple[StepCandidate, ...]:
    """Everything that may run in a pass.

    The framework is a candidate of what eager runs as one call. A family that takes long to build
    is a candidate of its largest groups only: a part of one is rarely worth a build.
    """
    steps = [s for s in alternatives(graph, all_fusions()) if s.phase != "refresh"]
    found: list[StepCandidate] = []
    first: dict[str, list[StepCandidate]] = {}
    for step in steps:
        twins = first.get(step.signature)
        if twins is None:
            own = [StepCandidate(step, c, space.arch) for c in candidates(step, space)]
            first[step.signature] = own
        else:
            own = [StepCandidate(step, twin.candidate, space.arch, twin) for twin in twins]
        found += own
    largest = _largest_groups(c for c in found if c.build_s >= LONG_BUILD_S)
    kind = space.arch.kind
    return tuple(c for c in found if _is_worthwhile(c, largest, kind))


def eagers_calls(candidates: Iterable[StepCandidate]) -> list[StepCandidate]:
    """Of the candidates what eager calls one after the other, in the layout that callers bring."""
    found = [
        each
        for each in candidates
        if each.candidate.family == FRAMEWORK and each.candidate.config["layout"] == "nchw"
    ]
    joined = {name for each in found if len(each.nodes) > 1 for name in each.nodes}
    return [each for each in found if len(each.nodes) > 1 or each.nodes[0] not in joined]


def candidates_of(plan: Plan, graph: Graph, space: SearchSpace) -> list[StepCandidate]:
    """What a plan runs in a pass; raises what `check_plan` raises."""
    of_pass = check_plan(plan, graph, space).of_pass
    return [StepCandidate(chosen.step, chosen.candidate, space.arch) for chosen in of_pass]


Group = tuple[str, frozenset[str]]


def _is_worthwhile(candidate: StepCandidate, largest: Collection[Group], kind: str) -> bool:
    if candidate.candidate.family == FRAMEWORK:
        return len(candidate.nodes) == 1 or is_one_call(candidate.step, kind)
    return candidate.build_s < LONG_BUILD_S or _group(candidate) in largest


def _group(candidate: StepCandidate) -> Group:
    return candidate.candidate.family, frozenset(candidate.nodes)


def _largest_groups(found: Iterable[StepCandidate]) -> set[Group]:
    """The groups that are not part of another group which the same family runs."""
    groups = {_group(candidate) for candidate in found}
    return {
        (family, nodes)
        for family, nodes in groups
        if not any(family == other and nodes < more for other, more in groups)
    }
