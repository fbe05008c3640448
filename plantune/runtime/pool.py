"""Instances of one plan, so that threads and overlapping passes never share memory."""

from __future__ import annotations

import threading
from itertools import chain
from types import TracebackType
from weakref import WeakSet

import torch
from torch import Tensor, nn

from plantune.graph.graph import Graph
from plantune.kernels.family import CPU
from plantune.plan import Plan
from plantune.runtime.captured import program_on
from plantune.runtime.live_state import HeldTensors, LiveState
from plantune.space.search_space import SearchSpace

# Passes that wait for their backward pass, each with an instance of its own.
MOST_PASSES = 8


class Instance:
    """A program with its view of the module's weights."""

    def __init__(self, graph: Graph, plan: Plan, space: SearchSpace, held: HeldTensors) -> None:
        self.program = program_on(device_of(held.module, held.otherwise), graph, plan, space)
        names = [name for name, _ in (*graph.parameters, *graph.buffers)]
        moving = {buffer for buffer, _ in graph.updates}
        self.state = LiveState(held, names)
        # What the graph itself updates in every pass is read in place and feeds no constant.
        self.weights = LiveState(held, [name for name in names if name not in moving])
        self.read_backward = LiveState(held, graph.weights_of_backward)
        self._held = held
        # The count of moves when the program was last given its tensors.
        self._moves: int | None = None

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs with the weights as they are now."""
        if self._is_due():
            moves, self._moves = self._held.moves, None
            # What is kept between passes must serve inside and outside of inference mode.
            with torch.inference_mode(False):
                self.program.refresh(self.state.tensors())
            self._moves = moves
        return self.program.forward(*inputs)

    def _is_due(self) -> bool:
        """Whether the program must be given its tensors again: some were replaced or moved, or it
        keeps copies of them and one was written.
        """
        written = self.program.keeps_copies and self.weights.changed()
        return written or self._moves != self._held.moves


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
        self._alive: WeakSet[Instance] = WeakSet()
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
            instance = Instance(self.graph, self.plan, self._space, self.held)
        self._alive.add(instance)
        return Lease(self, instance)

    def give_back(self, instance: Instance) -> None:
        # No lock: a collector may run this inside of `lease`, and append is atomic.
        if len(self._idle) < MOST_PASSES:
            self._idle.append(instance)

    def instances(self) -> list[Instance]:
        """All that there are, idle or not."""
        return list(self._alive)

    def busy(self) -> int:
        """How many are in use."""
        return len(self._alive) - len(self._idle)
