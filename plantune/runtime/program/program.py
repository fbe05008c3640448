"""A plan made runnable: kernels bound to planned memory, launched in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from plantune.devices.cuda import recording
from plantune.graph.graph import Graph
from plantune.graph.layouts import HOST_MEMORY, in_layout, view_bytes
from plantune.graph.ops.overload_backward import WANTED
from plantune.graph.tracing.eager_strides import Strides
from plantune.kernels.build import build, build_all
from plantune.kernels.cuda.image_layout import LayoutChange, layout_change
from plantune.kernels.family import Values
from plantune.kernels.weights.constants import Constant
from plantune.kernels.weights.copies import Copies
from plantune.plans.checked_plan import CheckedPlan
from plantune.runtime.program.arrivals import Arrivals, Report, arrival_places
from plantune.runtime.program.binding import bind, made_for
from plantune.runtime.program.branches import Enqueue, Lanes, branches_of
from plantune.runtime.program.conversions import Converter
from plantune.runtime.program.memory_plan import liveness, passes, taker
from plantune.runtime.program.result_strides import ResultStrides, with_strides
from plantune.runtime.program.schedule import Schedule, ScheduledStep, make_schedule
from plantune.runtime.program.weights import Weights

# They need nothing that a pass prepares.
BY_TORCH = ("framework", "view")


class Program:
    """One instance of a plan with memory of its own, used by one thread at a time.

    `refresh` comes before the first pass and whenever a weight changed. A `forward` may be followed
    by one or more `backward`, all but the last of which are told so; the next `forward` overwrites
    what they read.
    """

    # Of what follows from weights: it must hear of each change.
    keeps_copies = True
    # Without them results come in rows.
    result_strides: ResultStrides | None = None

    def __init__(
        self,
        checked: CheckedPlan,
        device: torch.device = HOST_MEMORY,
        *,
        seeds: bool = False,
    ) -> None:
        """With `seeds` there is room for gradients of outputs among the values."""
        schedule, graph, arch = make_schedule(checked), checked.graph, checked.space.arch
        branches = branches_of(schedule) if checked.plan.branches else ()
        on_gpu = device.type == "cuda"
        live = liveness(schedule, branches, seeds=seeds)
        self.graph, self.plan, self.device = graph, checked.plan, device
        # On a GPU a caller's memory may take the place of an output.
        apart = graph.outputs if on_gpu else ()
        take = taker(live.buffers, apart, device)
        self.values: Values = {}
        for name, type_ in graph.output_gradients if seeds else ():
            place = take(name, type_.size_bytes)
            self.values[name] = view_bytes(*place, type_, schedule.layouts[name])
        for launch in schedule.launches:
            self.values.update(made_for(launch, take))
        self._schedule = schedule
        self._arch = arch
        self._copies = Copies(arch, device)
        self._steps: dict[str, Enqueue] = {}
        self._converters: dict[str, Converter] = {}
        build_all((launch.chosen for launch in schedule.launches), arch)
        self._weights = None
        first = schedule.phase("refresh")
        if on_gpu:
            self._weights = Weights(graph, self.values, arch, device)
            first = self._weights.others(schedule)
        self._prepare: list[Enqueue] = []
        self._once: list[Enqueue] = []
        self._constants: dict[str, tuple[Constant, ...]] = {}
        lanes = Lanes(branches, device)
        launches, turn = passes(schedule), len(schedule.phase("forward"))
        self._rests: dict[str, Enqueue] = {launches[i].step.name: _nothing for i in lanes.halved}
        fixed = _fixed_values(graph, first)
        for launch in first:
            once = all(name in fixed for name, _ in launch.step.outputs)
            (self._once if once else self._prepare).extend(self._calls(launch))
        calls = [
            self._calls(launch, drops) for launch, drops in zip(launches, live.drops, strict=True)
        ]
        if self._weights is not None:
            self._weights.bind((*first, *launches), self._constants)
            if turn:
                self._prepare_beside(launches[:turn], calls)
        rests = {i: self._rests[launches[i].step.name] for i in lanes.halved}
        self._arrivals = _arrivals(graph, launches, lanes, turn)
        # Views of values at rest that a pass makes anew, by the steps that make them.
        self._views = {
            view: launch.step.name
            for launch in launches
            if launch.family.name == "view"
            for view, source in launch.aliases.items()
            if source in self.values
        }
        self._reads = {launch.step.name: launch.reads for launch in launches}
        self._reads |= {name: frozenset((c.source,)) for name, c in self._converters.items()}
        self._forward = lanes.ordered(calls, range(turn), rests)
        backward, marks = range(turn, len(calls)), self._arrivals.calls
        self._backward = lanes.ordered(calls, backward, rests, marks)
        self._owned = _owned_results(schedule)
        self._spent = live.spent
        self._left = (
            *live.kept_outside,
            *(name for name, _ in (*graph.inputs, *graph.output_gradients)),
        )

    def _prepare_beside(
        self, launches: Sequence[ScheduledStep], calls: Sequence[list[Enqueue]]
    ) -> None:
        """Launches of the forward pass wait for what follows from weights only if they read it."""
        assert self._weights is not None
        constants = [self._constants[launch.step.name] for launch in launches]
        self._weights.go_beside(launches[0], constants[0])
        for place in range(1, len(launches)):
            join = partial(self._weights.join_for, launches[place], constants[place])
            calls[place].insert(0, join)
        calls[len(launches) - 1].append(self._weights.end)

    def _calls(self, launch: ScheduledStep, drops: Sequence[str] = ()) -> list[Enqueue]:
        """What a launch does in each pass; its refresh joins the preparation."""
        binding = bind(launch, self.values, build(launch.chosen, self._arch), self.device)
        if binding.refresh is not None:
            self._prepare.append(binding.refresh)
        self._constants[launch.step.name] = binding.constants
        calls: list[Enqueue] = []
        for conversion in launch.conversions:
            made = Converter(conversion, self.values, self._arch, self.device)
            self._steps[made.label] = self._converters[made.label] = made
            calls.append(made)
        device = self.device  # not `self`: a program in a cycle would keep its memory
        name = launch.step.name

        def labelled(launch: Callable[[int], None]) -> Enqueue:
            def call() -> None:
                recording.label(name)
                launch(current_stream(device))

            return call

        self._steps[name] = run = labelled(binding.launch)
        if name in self._rests and binding.halves is not None:
            run, self._rests[name] = map(labelled, binding.halves)
        calls.append(run)
        if drops:
            calls.append(_drop(drops, self.values))
        return calls

    def place(self, state: Mapping[str, Tensor]) -> None:
        """Takes parameters and buffers by name, wherever they are in memory now."""
        if self._weights is not None:
            self._weights.place(state)
        else:
            self._place_in_rows(state)
        self._make_fixed()

    def _place_in_rows(self, state: Mapping[str, Tensor]) -> None:
        moving = {buffer for buffer, _ in self.graph.updates}
        for name, _ in (*self.graph.parameters, *self.graph.buffers):
            tensor = state[name].detach()
            # Steps rely on the layout; a moving buffer is written, so it must be the module's own.
            self.values[name] = tensor if name in moving else in_layout(tensor, "nchw")

    @torch.no_grad()
    def _make_fixed(self) -> None:
        """What never changes is made once, before the first pass: masks of windows were some 240
        launches of each of swin_t's passes.
        """
        for call in self._once:
            call()
        if self._once and self.device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return  # nothing is made before a replay
            # Passes may run on any stream. To wait for all of a GPU breaks others' captures.
            torch.cuda.current_stream(self.device).synchronize()
        self._once.clear()

    @torch.no_grad()
    def refresh(self, state: Mapping[str, Tensor]) -> None:
        """Takes parameters and buffers by name and computes everything that follows from them."""
        self.place(state)
        self.run_refresh()

    def run_refresh(self, *, orders: bool = False) -> None:
        """Computes what follows from weights alone; for `orders` see Preparation.launch."""
        self._make_fixed()
        if self._weights is not None:
            self._weights.compute(current_stream(self.device), self._prepare, orders=orders)
            return
        for call in self._prepare:
            call()

    @torch.no_grad()
    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs, in memory that is the caller's. Buffers that the graph updates are updated.

        Inputs must have the graph's shapes and dtypes; they are read, never written.
        """
        values = self.values
        for (name, type_), tensor in zip(self.graph.inputs, inputs, strict=True):
            values[name] = in_layout(tensor, type_.layout)
        self.run_forward()
        wanted = None if self.result_strides is None else self.result_strides.of(inputs)
        names = self.graph.outputs
        outputs = tuple(map(self._handed_over, names, wanted or (None,) * len(names)))
        if self.graph.backward_from is None:
            for name, _ in self.graph.inputs:
                del values[name]
        return outputs

    def replay(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return self.forward(*inputs)

    def layout_of(self, value: str) -> str:
        return self._schedule.layouts[value]

    def change_of(self, value: str, strides: tuple[int, ...]) -> LayoutChange | None:
        """What copies a value to where it has these strides, if a kernel of ours does that: images
        from one layout to the other. It is loaded here, which would break a capture.
        """
        type_, made = self.graph.types[value], self.layout_of(value)
        wanted = "nchw" if made == "nhwc" else "nhwc"
        if self.device.type != "cuda" or len(type_.shape) != 4 or strides != type_.strides(wanted):
            return None
        return layout_change(type_.shape, type_.torch_dtype, wanted, self._arch)

    def touching(self, value: str, phase: str = "forward") -> tuple[str, ...]:
        """The steps and conversions of a pass that read or write a value, if nothing but kernels of
        ours does; none if the framework takes part.
        """
        found = [
            launch
            for launch in self._schedule.phase(phase)
            if value in launch.reads | launch.writes
        ]
        labels: list[str] = []
        for launch in found:
            copies = [c.result for c in launch.conversions if c.source == value]
            if not all(self._converters[copy].is_kernel for copy in copies):
                return ()
            labels += copies
            if value not in launch.step.types:  # only its copy is read
                continue
            images = {name for name, _ in launch.step.inputs} - launch.step.constants
            at_rest = self.values.keys() | (self._views.keys() if phase == "forward" else ())
            if not images <= at_rest or not launch.family.launches_kernels:
                return ()
            labels.append(launch.step.name)
        return tuple(labels)

    def run_step(self, name: str) -> None:
        """One step alone, on whatever its inputs hold."""
        views = [view for view in self._views if view in self._reads[name] - self.values.keys()]
        for view in views:
            self._steps[self._views[view]]()
        self._steps[name]()
        for view in views:
            del self.values[view]

    def run_forward(self) -> None:
        """The forward pass alone: inputs are placed before, outputs taken afterwards."""
        for call in self._forward:
            call()
        moving = {buffer for buffer, _ in self.graph.updates}
        # A value that is a buffer of old has it until all have theirs.
        new = [
            self.values[value].clone() if value in moving else self.values[value]
            for _, value in self.graph.updates
        ]
        pairs = zip((self.values[buffer] for buffer, _ in self.graph.updates), new, strict=True)
        self._copies.launch(current_stream(self.device), [*pairs])

    def run_backward(self, report: Report | None = None) -> None:
        """The backward pass alone. `report` is called with gradients as they are made."""
        with self._arrivals.reporting_to(report):
            for call in self._backward:
                call()

    @contextmanager
    def spared(self, *, again: bool) -> Iterator[None]:
        """A backward pass inside, and taking its results, where what it overwrites of the forward
        pass is restored if it may come `again`. Who asks for that waits for copies; all others
        need less memory: se_resnet9_fixup 905 MiB instead of 1,161 with 2,048 images.
        """
        spent = [self.values[name] for name in self._spent] if again else []
        kept = [value.clone() for value in spent]
        yield
        for value, before in zip(spent, kept, strict=True):
            value.copy_(before)

    @torch.no_grad()
    def backward(self, *output_gradients: Tensor, again: bool = True) -> dict[str, Tensor]:
        """The gradients by the name of their input or parameter, in memory that is the caller's.
        `again` says that another backward may follow.
        """
        values = self.values
        for (name, _), tensor in zip(self.graph.output_gradients, output_gradients, strict=True):
            values[name] = in_layout(tensor, self.layout_of(name))
        with self.spared(again=again):
            self.run_backward()
            return {target: self._handed_over(value) for target, value in self.graph.gradients}

    def forget(self) -> None:
        """Frees what the last forward left for a backward that will not come (again).

        Kept until the next forward it would be there twice for a while. Without this a training
        step took 1.17 of eager's time, with it 1.08 (batch 8, 2 cores, 2026-11-20).
        """
        for name in self._left:
            self.values.pop(name, None)

    def _handed_over(self, name: str, strides: Strides = None) -> Tensor:
        """A result that the caller may keep and change, in rows or with `strides`: a copy, unless
        nothing else holds it.
        """
        if name in self._owned:
            return with_strides(self.values.pop(name), strides)
        value = self.values[name]
        if strides is None:
            return value.clone(memory_format=torch.contiguous_format)
        made = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
        return made.copy_(value)


def _arrivals(graph: Graph, launches: Sequence[ScheduledStep], lanes: Lanes, turn: int) -> Arrivals:
    made = [value for _, value in graph.gradients]
    return Arrivals(arrival_places(launches, lanes.branches, made, turn))


def current_stream(device: torch.device) -> int:
    """The handle of the stream to which kernels go; 0 on the CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _nothing() -> None:
    """The second half of a launch that turned out to be one."""


def _fixed_values(graph: Graph, launches: Iterable[ScheduledStep]) -> frozenset[str]:
    """Those of the graph's fixed values that torch makes of nothing but others of them."""
    made: set[str] = set()
    for launch in launches:
        outputs = {name for name, _ in launch.step.outputs}
        reads = launch.reads & graph.fixed
        if outputs <= graph.fixed and reads <= made and launch.family.name in BY_TORCH:
            made |= outputs
    return frozenset(made)


def _drop(names: Sequence[str], values: Values) -> Enqueue:
    def call() -> None:
        for name in names:
            del values[name]

    return call


def _owned_results(schedule: Schedule) -> frozenset[str]:
    """Results in memory that a kernel made anew and of which nothing else is needed: what a kernel
    made, or the one view of it that is.
    """
    graph = schedule.graph
    # What follows from weights alone is there in the next pass, too.
    adopted = {name for launch in passes(schedule) for name in launch.adopts}
    roots: dict[str, str] = {}
    for launch in schedule.launches:
        roots |= {name: roots.get(base, base) for name, base in launch.aliases.items()}
    handed = Counter((*graph.outputs, *(value for _, value in graph.gradients)))
    updates = [value for _, value in graph.updates]
    # Autograd may look at what a node made that it remembers.
    remembered = [value for node in graph.nodes if WANTED in node.attrs for value in node.outputs]
    needed = {*handed, *updates, *remembered, *graph.saved}
    in_memory = Counter(roots.get(name, name) for name in needed)
    others = {*updates, *remembered, *graph.saved}
    return frozenset(
        name
        for name, count in handed.items()
        if count == 1 and name not in others
        if (root := roots.get(name, name)) in adopted - roots.keys() and in_memory[root] == 1
    )
