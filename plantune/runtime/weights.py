"""What a program computes from weights alone: on a GPU in each pass, in stream order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from plantune.graph.graph import Graph
from plantune.kernels.constants import Constant, as_it_is
from plantune.kernels.family import Values
from plantune.kernels.patterns.derived import derived_values
from plantune.kernels.preparation import Preparation
from plantune.runtime.schedule import Launch, Schedule
from plantune.runtime.streams import stream_for
from plantune.space.arch import Arch

Call = Callable[[], None]


class Beside:
    """A stream of its own for work that a pass needs after its first launch.

    A preparation takes as long as the first kernel of se_resnet9_fixup, 3 to 5 us (H200).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = stream_for(self, device)
        self._forked, self._done = torch.cuda.Event(), torch.cuda.Event()
        self._runs = False

    @contextmanager
    def forked(self) -> Iterator[int]:
        """Inside, work goes to that stream, whose handle this gives."""
        self._forked.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._forked)
        with torch.cuda.stream(self._stream):
            yield self._stream.cuda_stream
            self._done.record(self._stream)
        self._runs = True

    def join(self) -> None:
        if self._runs:
            torch.cuda.current_stream(self._device).wait_event(self._done)
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
        self._sources: dict[str, Tensor] = {}
        self._early = self._late = Preparation((), {}, {}, arch, device)
        self._first: tuple[Constant, ...] = ()
        self._beside: Beside | None = None

    def others(self, schedule: Schedule) -> tuple[Launch, ...]:
        """The launches of what is no expression over weights."""
        return tuple(
            launch
            for launch in schedule.phase("refresh")
            if not all(name in self._derived for name, _ in launch.step.outputs)
        )

    def bind(self, launches: Iterable[Launch], constants: Mapping[str, Sequence[Constant]]) -> None:
        """Takes what the kernels of all launches read otherwise than it is, by the step's name."""
        early: dict[str, Constant] = {}
        for launch in launches:
            covered = {constant.name for constant in constants[launch.step.name]}
            for name in launch.step.constants - covered:
                if name in self._derived:
                    early.setdefault(name, self._kept(name))
        given = [constant for group in constants.values() for constant in group]
        for constant in given:
            constant.is_derived = constant.name in self._derived
        known = {*self._derived, *(n for n, _ in (*self._graph.parameters, *self._graph.buffers))}
        first = [constant for constant in given if constant.name in known]
        last = [constant for constant in given if constant.name not in known]
        self._early = Preparation(
            (*early.values(), *first), self._sources, self._derived, self._arch, self._device
        )
        self._late = Preparation(last, self._values, {}, self._arch, self._device)

    def go_beside(self, first: Sequence[Constant]) -> None:
        """From now on what the kernels need is made beside the first launch of a pass, which reads
        these constants, if it finds all of them where they lie. `join` follows that launch.
        """
        self._first = tuple(first)
        self._beside = Beside(self._device)

    def _kept(self, name: str) -> Constant:
        """A derived value that a kernel reads as it is."""
        if name not in self._values:
            type_ = self._graph.types[name]
            self._values[name] = torch.empty(
                type_.shape, dtype=type_.torch_dtype, device=self._device
            )
        return Constant(self._values, name, self._values[name], as_it_is)

    def place(self, state: Mapping[str, Tensor]) -> None:
        """Takes parameters and buffers by name, wherever they lie; may not be captured."""
        for name, _ in (*self._graph.parameters, *self._graph.buffers):
            self._sources[name] = self._values[name] = state[name].detach()
        self._early.place()

    def compute(self, stream: int, others: Sequence[Call], *, orders: bool = False) -> None:
        """Enqueues all of it; see `Preparation.launch`."""
        if self._beside is not None and self._may_go_beside() and not others and not orders:
            with self._beside.forked() as side:
                self._enqueue(side, others)
            return
        self._enqueue(stream, others, orders=orders)

    def _may_go_beside(self) -> bool:
        """Whether there is something to make, and the first launch needs none of it."""
        return bool(self.launches) and all(constant.is_in_place() for constant in self._first)

    def join(self) -> None:
        """What follows waits for what was made beside."""
        if self._beside is not None:
            self._beside.join()

    def _enqueue(self, stream: int, others: Sequence[Call], *, orders: bool = False) -> None:
        self._early.launch(stream, orders=orders)
        for call in others:
            call()
        self._late.place()  # where the framework made them in this run
        self._late.launch(stream)

    @property
    def launches(self) -> int:
        """Launches of a pass, those of the framework left out."""
        return self._early.launches + self._late.launches
