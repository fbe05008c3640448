"""Instances of one plan, so that threads and overlapping passes never share memory."""

from __future__ import annotations

import threading
from itertools import chain
from types import TracebackType

import torch
from torch import Tensor, nn

from plantune.graph.graph import Graph
from plantune.kernels.family import CPU
from plantune.plan import Plan
from plantune.runtime.captured import CapturedProgram, Started, program_on
from plantune.runtime.live_state import HeldTensors, LiveState
from plantune.space.search_space import SearchSpace


class Instance:
    """A program with its view of the module's weights."""

    def __init__(self, graph: Graph, plan: Plan, space: SearchSpace, held: HeldTensors) -> None:
        self.program = program_on(device_of(held.module, held.otherwise), graph, plan, space)
        names = [name for name, _ in (*graph.parameters, *graph.buffers)]
        moving = {buffer for buffer, _ in graph.updates}
        self.state = LiveState(held, names)
        # What the graph itself updates in every pass is read in place and feeds no constant.
        self.weights = LiveState(held, [name for name in names if name not in moving])
        self._held = held
        self._stale = True
        # Whether the last pass found the weights as the one before had left them, and the count of
        # moves then.
        self._calm = False
        self._moves = -1
        self._launches_ahead = isinstance(self.program, CapturedProgram) and not graph.updates

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs with the weights as the last look at them found them."""
        if not self._is_calm():
            # What is kept between passes must serve inside and outside of inference mode.
            with torch.inference_mode(False):
                self.program.refresh(self.state.tensors())
            self._stale = False
        return self.program.forward(*inputs)

    def confirmed(self, started: Started) -> tuple[Tensor, ...] | None:
        """The outputs of what `launch_ahead` started; None where a weight had changed by then."""
        assert isinstance(self.program, CapturedProgram)
        if self._is_calm():
            return self.program.taken(started)
        self._stale = True
        return None

    def _is_calm(self) -> bool:
        """Whether the last look found the weights as the program has them. Notes what it found."""
        moves = self._held.moves
        # What passes update is no weight here, but may be another tensor now.
        moved, self._moves = moves != self._moves, moves
        self._calm = not (self.weights.changed() or moved or self._stale)
        return self._calm

    def launch_ahead(self, *inputs: Tensor) -> Started | None:
        """Starts a pass before anybody looks whether weights changed; `confirmed` says whether it
        counts. None where that is not possible, where they change all the time, or where they do
        not lie where graphs read them: storages may be resized under us.

        The memory of other weights is held by the program, whatever became of the module's.
        """
        if not (self._calm and self._launches_ahead) or torch.cuda.is_current_stream_capturing():
            return None
        assert isinstance(self.program, CapturedProgram)
        # In this order: another thread that finds them elsewhere counts before it notes it.
        if not self._held.in_place() or self._moves != self._held.moves:
            return None
        return self.program.launch(*inputs)


def device_of(module: nn.Module, otherwise: torch.device = CPU) -> torch.device:
    """Where the module lives; all of it does, or the framework would refuse it, too.

    One without a tensor of its own runs where its input is, which `otherwise` says.
    """
    state = next(chain(module.parameters(), module.buffers()), None)
    return otherwise if state is None else state.device


class Lease:
    """An instance in use. It goes back to its pool on `release`, or when nobody holds the lease."""

    def __init__(self, pool: Pool, instance: Instance) -> None:
        self.pool = pool
        self._held: Instance | None = instance

    @property
    def instance(self) -> Instance:
        if self._held is None:
            raise RuntimeError("this pass was given up after an error; run forward again")
        return self._held

    def release(self) -> None:
        instance, self._held = self._held, None
        if instance is not None:
            self.pool.give_back(instance)

    def discard(self) -> None:
        """After an error: what the instance holds is not known, so it is not used again."""
        self._held = None

    def __enter__(self) -> Instance:
        return self.instance

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.release()
        else:
            self.discard()

    def __del__(self) -> None:
        self.release()


class Pool:
    """Makes an instance where none is idle; most programs need one."""

    def __init__(self, graph: Graph, plan: Plan, space: SearchSpace, held: HeldTensors) -> None:
        self.graph = graph
        self.plan = plan
        self._space = space
        self.held = held
        self._idle: list[Instance] = []
        self._lock = threading.Lock()

    def idle(self) -> Lease | None:
        """An instance that nobody uses now, None where there is none."""
        with self._lock:
            return Lease(self, self._idle.pop()) if self._idle else None

    def lease(self) -> Lease:
        idle = self.idle()
        if idle is not None:
            return idle
        with torch.inference_mode(False):
            return Lease(self, Instance(self.graph, self.plan, self._space, self.held))

    def give_back(self, instance: Instance) -> None:
        # No lock: a collector may run this inside of `lease`, and append is atomic.
        self._idle.append(instance)
