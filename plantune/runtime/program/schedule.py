"""The order of launches: the plan's steps, with the layout conversions that they need between."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from plantune.base.canonical import Attrs
from plantune.graph import Graph, Step, TensorType
from plantune.graph.layouts import aligned, moves
from plantune.graph.partition import Partition
from plantune.kernels.family import AnyFamily, Candidate, Parts
from plantune.kernels.registry import resolve
from plantune.kernels.resolved import ResolvedStep
from plantune.plans.checked_plan import CheckedPlan
from plantune.runtime.program.loose import loose_values

# What torch makes of a permute is a view.
LEFT = Candidate("framework", Attrs(layout="nchw"))


@dataclass(frozen=True)
class Conversion:
    """A copy of value `source` in another layout, under a name of its own."""

    source: str
    result: str
    layout: str


@dataclass(frozen=True)
class ScheduledStep:
    """A step with its inputs renamed to where they are stored in the layout that it demands."""

    chosen: ResolvedStep
    conversions: tuple[Conversion, ...] = ()
    # Outputs that are left as torch makes them, views among them, as nothing needs them dense.
    loose: frozenset[str] = frozenset()
    # Inputs that other launches write into memory of the program's.
    aligned: frozenset[str] = frozenset()

    @property
    def step(self) -> Step:
        return self.chosen.step

    @property
    def candidate(self) -> Candidate:
        return self.chosen.candidate

    @property
    def family(self) -> AnyFamily:
        return self.chosen.family

    @property
    def parts(self) -> Parts:
        return self.chosen.parts

    @cached_property
    def aliases(self) -> dict[str, str]:
        known = dict(self.family.aliases(self.parts, self.candidate.config))
        left = self.family.leaves_loose(self.parts, self.candidate.config) if self.loose else {}
        return known | {n: base for n, base in left.items() if n in self.loose and base is not None}

    @cached_property
    def adopts(self) -> frozenset[str]:
        return self.family.adopts(self.parts, self.candidate.config) | self.loose

    @cached_property
    def layouts(self) -> dict[str, str]:
        return dict(self.family.layouts(self.parts, self.candidate.config))

    @property
    def reads(self) -> frozenset[str]:
        """The values that must be there before it."""
        made = {conversion.result for conversion in self.conversions}
        sources = {conversion.source for conversion in self.conversions}
        return frozenset(sources | {name for name, _ in self.step.inputs} - made)

    @property
    def writes(self) -> frozenset[str]:
        """The values that exist after it."""
        made = {conversion.result for conversion in self.conversions}
        return frozenset(made | {name for name, _ in self.step.outputs})

    @cached_property
    def written(self) -> list[tuple[str, TensorType, str]]:
        """What it writes into given memory: name, type, layout."""
        types, layouts = self.step.types, self.layouts
        elsewhere = self.adopts | self.aliases.keys()
        return [
            *((copy.result, types[copy.result], copy.layout) for copy in self.conversions),
            *(
                (name, type_, layouts.get(name, "nchw"))
                for name, type_ in self.step.outputs
                if name not in elsewhere
            ),
        ]

    @property
    def rest(self) -> frozenset[str]:
        """What the second half of the launch touches, if it has one."""
        return self.family.rest(self.parts, self.candidate.config)

    @property
    def workspace(self) -> str:
        """The name of its workspace among the buffers."""
        return f"workspace of {self.step.name}"

    @cached_property
    def workspace_bytes(self) -> int:
        """Aligned inputs need no room for copies. Found once: on a CPU it may depend on how many
        threads there are.
        """
        spared = self.aligned & self.family.copied(self.parts)
        rooms = sum(aligned(self.step.types[name].size_bytes) for name in spared)
        return self.family.workspace_bytes(self.parts, self.candidate.config) - rooms


@dataclass(frozen=True)
class Schedule:
    """All launches in order, and the layout of each value."""

    graph: Graph
    launches: tuple[ScheduledStep, ...]
    layouts: dict[str, str]

    def phase(self, name: str) -> tuple[ScheduledStep, ...]:
        return tuple(launch for launch in self.launches if launch.step.phase == name)


def make_schedule(checked: CheckedPlan) -> Schedule:
    """Decides each value's layout by its producer and converts where a reader demands another.
    Gradients of outputs are laid out for their first reader: they are copied from a caller anyway.
    """
    graph = checked.graph
    left = set(_permuted_last(graph, checked.partition))
    steps = [resolve(each.step, LEFT) if each.name in left else each for each in checked.steps]
    layouts = {name: type_.layout for name, type_ in graph.sources}
    for name, _ in graph.output_gradients:
        layouts[name] = next(_demands(name, steps), layouts[name])
    loose = loose_values(graph, steps, layouts)
    launches: list[ScheduledStep] = []
    own: set[str] = set()
    for chosen in steps:
        launch = _converted(chosen, layouts, loose)
        own.update(name for name, _, _ in launch.written)
        read = own.intersection(name for name, _ in launch.step.inputs)
        launch = replace(launch, aligned=frozenset(read))
        demanded = launch.layouts
        for name, _ in launch.step.outputs:
            layouts[name] = demanded.get(name, "nchw")
        launches.append(launch)
    return Schedule(graph, tuple(launches), layouts)


def _permuted_last(graph: Graph, steps: Partition) -> Iterator[str]:
    """The steps that permute what nothing but the caller reads, who gets it in eager's strides:
    nothing needs to be moved, or converted, for a view of it.
    """
    kept = {value for _, value in (*graph.updates, *graph.gradients)}
    given = {name for name, _ in graph.inputs} if graph.backward_from is not None else set()
    for step in steps:
        if step.ops != ("permute",) or step.phase != "forward":
            continue
        (source, _), (name, _) = step.inputs[0], step.outputs[0]
        if not graph.consumers[name] and name not in kept and source not in given:
            yield step.name


def _demands(name: str, steps: Iterable[ResolvedStep]) -> Iterator[str]:
    """The layouts in which steps read a value, in order."""
    for chosen in steps:
        if name in dict(chosen.step.inputs):
            demanded = ScheduledStep(chosen).layouts
            if name in demanded:
                yield demanded[name]


def _converted(
    chosen: ResolvedStep, layouts: dict[str, str], loose: frozenset[str]
) -> ScheduledStep:
    step, demanded = chosen.step, ScheduledStep(chosen).layouts
    free = loose & chosen.family.reads_loose(chosen.parts, chosen.config)
    renamed: dict[str, str] = {}
    conversions = []
    for name, type_ in step.inputs:
        layout = demanded.get(name, layouts[name])
        if name not in free and moves(type_, layouts[name], layout):
            renamed[name] = f"{name} in {layout}"
            if renamed[name] not in layouts:
                layouts[renamed[name]] = layout
                conversions.append(Conversion(name, renamed[name], layout))
    left = loose.intersection(name for name, _ in step.outputs)
    return ScheduledStep(chosen.renamed(renamed), tuple(conversions), left)
