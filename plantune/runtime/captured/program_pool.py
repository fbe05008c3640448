"""Instances of one plan, so that threads and overlapping passes never share memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from itertools import chain
from weakref import WeakSet

import torch
from torch import Tensor, nn

from plantune.base.scopes import with_values
from plantune.devices.cuda.driver import capture_of
from plantune.errors import CaptureError
from plantune.graph.layouts import HOST_MEMORY
from plantune.graph.tracing.arguments import Arguments
from plantune.plans.checked_plan import CheckedPlan
from plantune.runtime.captured.captured_program import program_on
from plantune.runtime.captured.current_gpu import on_its_gpu
from plantune.runtime.captured.shipped import Shipped
from plantune.runtime.program.result_strides import ResultStrides
from plantune.runtime.watched.live_state import LiveState, OwnedTensors, counters_of
from plantune.runtime.watched.torch_internals import current_gpu, is_capturing

# The number of a capture, and the stream.
Capture = tuple[int, int]
# Passes that wait for their backward pass, each with an instance of its own.
MOST_PASSES = 8
NEVER = (-1, -1)  # by the counts of OwnedTensors


class Instance:
    """A program with its view of the module's weights."""

    def __init__(self, pool: ProgramPool) -> None:
        graph, owned = pool.graph, pool.owned
        device = device_of(owned.module, owned.otherwise)
        self.program = program_on(device, pool.checked, frozen=pool.frozen)
        self.program.result_strides = pool.result_strides
        names = [name for name, _ in (*graph.parameters, *graph.buffers)]
        moving = {buffer for buffer, _ in graph.updates}
        self.state = LiveState(owned, names)
        # What the graph itself updates in every pass is read in place and feeds no constant.
        still = [name for name in names if name not in moving]
        self.weights = LiveState(owned, [*still, *counters_of(still)])
        self.read_backward = LiveState(owned, graph.weights_of_backward)
        self.has_run = False
        self._owned, self._frozen = owned, pool.frozen
        # When the program was last given its tensors.
        self._given = NEVER
        self._keeps_copies = self.program.keeps_copies and not pool.frozen

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs with the weights as they are now."""
        if self.is_due():
            self._refresh()
        outputs = self.program.forward(*inputs)
        self.has_run = True
        return outputs

    def replay(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """`forward`, if no capture is under way and this program's GPU is the current one."""
        # All that `is_due` asks for most: a call less.
        may_be_due = self._keeps_copies or self._frozen or self._given[0] != self._owned.moves
        if may_be_due and self.is_due():
            self._refresh()
        outputs = self.program.replay(inputs)
        self.has_run = True
        return outputs

    def _refresh(self) -> None:
        given, self._given = (self._owned.moves, self._owned.writes), NEVER
        # What is kept between passes must serve inside and outside of inference mode.
        with torch.inference_mode(False):
            self.program.refresh(self.state.tensors())
        self._given = given

    def is_due(self) -> bool:
        """Whether the program must be given its tensors again: some were replaced or moved, or it
        keeps what follows from them and one was written.
        """
        # Always: what is seen now is not a change the next time.
        written = self._keeps_copies and self.weights.changed()
        moves, writes = self._given
        if moves != self._owned.moves:
            return True
        return written or (self._frozen and writes != self._owned.writes)


def device_of(module: nn.Module, otherwise: torch.device = HOST_MEMORY) -> torch.device:
    """Where the module lives; all of it does, or the framework would refuse it too.

    One without a tensor of its own runs where its input is, which `otherwise` says.
    """
    state = next(chain(module.parameters(), module.buffers()), None)
    return otherwise if state is None else state.device


def capture_on(device: torch.device) -> Capture:
    """The capture that is under way on the current stream."""
    stream = torch.cuda.current_stream(device).cuda_stream
    found = capture_of(stream)
    return (found[0] if found is not None else 0, stream)


class Loan:
    """An instance in use. It goes back to its pool on `release`, or when the loan is garbage."""

    def __init__(
        self, pool: ProgramPool, instance: Instance, capture: Capture | None = None
    ) -> None:
        self.pool = pool
        self._instance: Instance | None = instance
        self._capture = capture

    @property
    def instance(self) -> Instance:
        if self._instance is None:
            raise RuntimeError("this pass was abandoned after an error; run forward again")
        return self._instance

    def release(self) -> None:
        instance, self._instance = self._instance, None
        if instance is not None:
            self.pool.give_back(instance, self._capture)

    def discard(self) -> None:
        """After an error: what the instance holds is not known, so it is not used again."""
        self._instance = None

    def __enter__(self) -> Instance:
        return self.instance

    def __exit__(self, kind: object, *rest: object) -> None:
        self.release() if kind is None else self.discard()

    def __del__(self) -> None:
        self.release()


class ProgramPool:
    """Instances of one program; makes another one if none is idle, and most programs need one.

    What a caller's capture uses belongs to that capture, which may be replayed at any time: nobody
    else gets it, and it lives as long as the process.
    """

    def __init__(
        self,
        checked: CheckedPlan,
        owned: OwnedTensors,
        *,
        frozen: bool = False,
    ) -> None:
        self.checked = checked
        self.graph, self.plan, self.space = checked.graph, checked.plan, checked.space
        # How a stored plan's environment matches this one; None of a plan that is not stored.
        self.match: str | None = None
        # A plan that may be faster here, to be tried in the first calls.
        self.shipped: Shipped | None = None
        self.owned = owned
        self.frozen = frozen
        self.result_strides: ResultStrides | None = None
        self._idle: list[Instance] = []
        self._captured: dict[Capture, list[Instance]] = {}
        self._left_to_captures = 0
        self._alive: WeakSet[Instance] = WeakSet()
        self._lock = threading.Lock()
        self.device = device_of(owned.module, owned.otherwise)
        self._on_gpu, self._index = self.device.type == "cuda", self.device.index

    def lay_out(self, call: Arguments, *, in_rows: bool) -> None:
        """Has the results of such calls come as eager's do, which may always be `in_rows`."""
        if self.result_strides is not None:
            return
        rows = (None,) * len(self.graph.outputs) if in_rows else ()
        trains = self.graph.backward_from is not None
        self.come_as(ResultStrides(self.owned, call, self.device, rows, trains=trains))

    def come_as(self, strides: ResultStrides | None) -> None:
        """Results come with these strides from now on."""
        self.result_strides = strides
        for instance in self.instances():
            instance.program.result_strides = strides

    def run(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs of a pass after which nothing is read. One that breaks takes its instance
        along: what that holds is not known.
        """
        if self._on_gpu and (current_gpu() != self._index or is_capturing()):
            return self._run_lent(*inputs)
        idle = self._idle
        try:
            instance = idle.pop()  # atomic
        except IndexError:
            instance = self._made()
        outputs = instance.replay(inputs)
        if len(idle) < MOST_PASSES:
            idle.append(instance)
        return outputs

    @on_its_gpu
    def _run_lent(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        with self.lend() as lent:
            return lent.forward(*inputs)

    def lend(self) -> Loan:
        return self._lend_on_gpu() if self._on_gpu else Loan(self, self._taken())

    @on_its_gpu
    def _lend_on_gpu(self) -> Loan:
        if is_capturing():
            return self._lend_in(capture_on(self.device))
        return Loan(self, self._taken())

    def _taken(self) -> Instance:
        try:
            return self._idle.pop()
        except IndexError:
            return self._made()

    def _made(self) -> Instance:
        with torch.inference_mode(False):
            instance = Instance(self)
        self._alive.add(instance)
        return instance

    def _lend_in(self, capture: Capture) -> Loan:
        """In one capture, one stream orders what it is given."""
        with self._lock:
            own = self._captured.setdefault(capture, [])
            instance = _ready(own)
            if instance is None:
                instance = _ready(self._idle)
                if instance is None:
                    raise CaptureError(
                        "this call cannot be captured in a CUDA graph: no instance that has run "
                        "before is idle; call the module once before each capture"
                    )
                keeper = _kept_by.keeper
                if keeper is None:
                    _in_captures.append(instance)
                else:
                    keeper.pools.append((self, capture))
                self._left_to_captures += 1
            return Loan(self, instance, capture)

    def let_go(self, capture: Capture) -> None:
        """Drops what a capture uses, whose graph is gone."""
        with self._lock:
            self._left_to_captures -= len(self._captured.pop(capture, ()))

    def give_back(self, instance: Instance, capture: Capture | None = None) -> None:
        # No lock: a collector may run this inside of `lend`, and append is atomic.
        if capture is not None:
            if capture in self._captured:  # else its graph is gone
                self._captured[capture].append(instance)
        elif len(self._idle) < MOST_PASSES:
            self._idle.append(instance)

    def instances(self) -> list[Instance]:
        """All that there are, idle or not."""
        return list(self._alive)

    def busy(self) -> int:
        """How many are in use, those left to captures aside."""
        return len(self._alive) - len(self._idle) - self._left_to_captures


def _ready(instances: list[Instance]) -> Instance | None:
    """Takes one out that needs only to be launched; all else cannot be captured."""
    for instance in [*instances]:
        if not instance.has_run or instance.is_due():
            continue
        with suppress(ValueError):  # another thread has it by now
            instances.remove(instance)  # atomic
            return instance
    return None


class Keeper:
    """Who captures calls of tuned modules in a graph of plantune's own: instances in it live as
    long as the graph, not as the process.
    """

    def __init__(self) -> None:
        self.pools: list[tuple[ProgramPool, Capture]] = []

    def keeping(self) -> AbstractContextManager[None]:
        """Inside, what this thread's captures take is for `let_go`."""
        return with_values(_kept_by, keeper=self)

    def let_go(self) -> None:
        """After the graph is gone."""
        while self.pools:
            pool, capture = self.pools.pop()
            pool.let_go(capture)


class _KeptBy(threading.local):
    keeper: Keeper | None = None


_kept_by = _KeptBy()
# Their memory is part of graphs that plantune does not see.
_in_captures: list[Instance] = []
