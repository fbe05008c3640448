"""What a program computes from weights alone: on a GPU in each pass, in stream order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from plantune.graph.graph import Graph
from plantune.kernels.family import Values
from plantune.kernels.patterns.derived import derived_values
from plantune.kernels.weights.constants import Constant, Room, as_it_is
from plantune.kernels.weights.preparation import Preparation
from plantune.runtime.program.branches import Enqueue
from plantune.runtime.program.schedule import Schedule, ScheduledStep
from plantune.runtime.program.streams import Side
from plantune.space.arch import Arch


class Beside(Side):
    """Work that a pass needs after its first launch.

    A preparation takes as long as the first kernel of se_resnet9_fixup, 3 to 5 us (H200), and
    starts late if that kernel fills the chip: se_resnet9_fixup at batch 512 takes 172 us if the
    second kernel waits for it, and 165 if the only one does that reads it (H200, 2026-11-22).
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, "weights")
        self._runs = False
        self._waiting: set[int] = set()

    @contextmanager
    def forked(self) -> Iterator[int]:
        """Inside, work goes to that stream, whose handle this gives."""
        self.fork()
        with self.inside() as handle:
            yield handle
        self._runs = True
        self._waiting.clear()

    @property
    def runs(self) -> bool:
        """True until the pass has ended."""
        return self._runs

    def join(self) -> None:
        """The current stream waits for this work; each branch has a stream of its own."""
        handle = torch.cuda.current_stream(self._device).cuda_stream
        if handle not in self._waiting:
            super().join()
            self._waiting.add(handle)

    def end(self) -> None:
        """Ends the pass, which this work is part of."""
        self.join()
        self._runs = False


class Weights:
    """The parameters and buffers of a program, and what follows from them.

    What is one expression over them, and what kernels read in an order of their own, takes one
    launch for all. The rest, `others`, is computed by the framework, step by step.
    """

    def __init__(self, graph: Graph, values: Values, arch: Arch, device: torch.device) -> None:
        self._graph, self._values = graph, values
        self._arch, self._device = arch, device
        self._derived = derived_values(graph)
        self._rooms: dict[str, Tensor] = {}
        self._sources: dict[str, Tensor] = {}
        self._early = self._late = Preparation((), {}, {}, arch, device)
        self._first: tuple[Constant, ...] = ()
        self._beside: Beside | None = None

    def others(self, schedule: Schedule) -> tuple[ScheduledStep, ...]:
        """The launches of what is not an expression over weights.

        What they make on the way is theirs. Other derived values are there only if `bind` finds
        that somebody reads them as they are.
        """
        found = [
            launch
            for launch in schedule.phase("refresh")
            if not all(name in self._derived for name, _ in launch.step.outputs)
        ]
        for launch in found:
            for name, _ in launch.step.outputs:
                self._derived.pop(name, None)
        for name in self._derived.keys() & self._values.keys():
            self._rooms[name] = self._values.pop(name)
        return tuple(found)

    def bind(
        self, launches: Iterable[ScheduledStep], constants: Mapping[str, Sequence[Constant]]
    ) -> None:
        """Takes what the kernels of all launches read otherwise than it is, by the step's name."""
        read = set(self._graph.results)
        for launch in launches:
            group = constants[launch.step.name]
            read |= launch.reads - {constant.name for constant in group if not constant.by_torch}
        early = [self._kept(name) for name in self._derived if name in read]
        given = [constant for group in constants.values() for constant in group]
        for constant in given:
            constant.is_derived = constant.name in self._derived
        known = {*self._derived, *(n for n, _ in (*self._graph.parameters, *self._graph.buffers))}
        first = [constant for constant in given if known.issuperset(constant.reads)]
        last = [constant for constant in given if not known.issuperset(constant.reads)]
        self._early = Preparation(
            (*early, *first), self._sources, self._derived, self._arch, self._device
        )
        self._late = Preparation(last, self._values, {}, self._arch, self._device)
        self._rooms.clear()

    def go_beside(self, launch: ScheduledStep, constants: Sequence[Constant]) -> None:
        """From now on what the kernels need is made beside the first launch of a pass, which reads
        these constants, if it can read all of them in place. `join_for` precedes each of the
        other launches, and `end` follows the last.
        """
        if not launch.reads & self._derived.keys():
            self._first = tuple(constants)
            self._beside = Beside(self._device)

    def join_for(self, launch: ScheduledStep, constants: Sequence[Constant]) -> None:
        """Waits for what is made beside, if this launch reads any of it."""
        if self._beside is None or not self._beside.runs:
            return
        derived = launch.reads & self._derived.keys()
        if derived or not all(constant.is_in_place() for constant in constants):
            self._beside.join()

    def end(self) -> None:
        """Ends a pass: all that was made beside belongs to it."""
        if self._beside is not None and self._beside.runs:
            self._beside.end()

    def _kept(self, name: str) -> Constant:
        """A derived value that a kernel reads as it is."""
        type_ = self._graph.types[name]
        room = Room(type_.shape, type_.torch_dtype, self._device)
        self._values[name] = self._rooms[name] if name in self._rooms else room.make()
        return Constant(self._values, name, self._values[name], as_it_is)

    def place(self, state: Mapping[str, Tensor]) -> None:
        """Takes parameters and buffers by name, wherever they are; may not be captured."""
        for name, _ in (*self._graph.parameters, *self._graph.buffers):
            self._sources[name] = self._values[name] = state[name].detach()
        self._early.place()

    def compute(self, stream: int, others: Sequence[Enqueue], *, orders: bool = False) -> None:
        """Enqueues all of it; see `Preparation.launch`."""
        if self._beside is not None and self._may_go_beside() and not others and not orders:
            with self._beside.forked() as side:
                self._enqueue(side, others)
            return
        self._enqueue(stream, others, orders=orders)

    def _may_go_beside(self) -> bool:
        """Whether there is something to make, and the first launch needs none of it."""
        return bool(self.launches) and all(constant.is_in_place() for constant in self._first)

    def _enqueue(self, stream: int, others: Sequence[Enqueue], *, orders: bool = False) -> None:
        self._early.launch(stream, orders=orders)
        for call in others:
            call()
        self._late.place()  # where the framework made them in this run
        self._late.launch(stream)

    @property
    def launches(self) -> int:
        """Launches of a pass, those of the framework left out."""
        return self._early.launches + self._late.launches
