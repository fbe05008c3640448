"""A program on a GPU: each pass is one captured graph, replayed on the caller's stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from plantune.device import no_collection
from plantune.errors import CaptureError
from plantune.graph.graph import Graph
from plantune.graph.types import TensorType
from plantune.memory import MEMORY_FORMATS
from plantune.plan import Plan
from plantune.runtime.program import Program
from plantune.runtime.streams import stream_for
from plantune.space.search_space import SearchSpace

# A caller that brings its input at the same address this often in a row gets a graph that reads it
# there: the copy took 4.6 us of 119 (se_resnet9_fixup, batch 128, H200, 2026-11-20).
DIRECT_AFTER = 16
MOST_DIRECT = 4
# Libraries choose algorithms and take workspaces in their first calls, which cannot be captured.
WARM_UP_PASSES = 2
# torch captures one graph at a time in a process.
_one_capture = threading.Lock()
# Private, but what torch's own compiled graphs ask: 0.2 us instead of 2.7 (H200, 2026-11-20).
_raw_stream = getattr(
    torch._C,
    "_cuda_getCurrentRawStream",
    lambda index: torch.cuda.current_stream(index).cuda_stream,
)
# Private, but what torch's own captures end with.
_end_allocation = getattr(torch._C, "_cuda_endAllocateToPool", lambda index, pool: None)
_release_pool = getattr(torch._C, "_cuda_releasePool", lambda index, pool: None)


Results = Mapping[str, Tensor]


@dataclass(frozen=True)
class Pass:
    """A captured pass, and the values that each replay writes anew."""

    graph: torch.cuda.CUDAGraph
    results: Results


class CapturedProgram:
    """A program's face over captured graphs.

    Inputs are copied into memory of its own, or read where they lie by a graph for that address;
    either way a caller may free or change them after the call, in the order of its stream. Graphs
    read weights where they lie: one that moved is captured anew, one that changed in place is not.
    It may be called on any stream, from one thread at a time.
    """

    def __init__(self, graph: Graph, plan: Plan, space: SearchSpace, device: torch.device) -> None:
        self.graph = graph
        self.plan = plan
        self._program = Program(graph, plan, space, device)
        self._device = device
        self._side = stream_for(self, device)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream | None = None
        self._raw_stream: int | None = None
        self._addresses: tuple[int, ...] = ()
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._weights: list[Tensor] = []
        self._places: list[int] = []
        self._passes: dict[str, Pass] = {}
        self._direct: dict[tuple[int, ...], Pass] = {}
        self._inputs = [self._place(name, type_) for name, type_ in graph.inputs]
        self._gradients = [self._place(name, type_) for name, type_ in graph.output_gradients]
        self._strides = [own.stride() for own in self._inputs]
        self._last_inputs: tuple[int, ...] = ()
        self._repeats = 0
        self._most_direct = MOST_DIRECT

    def _place(self, name: str, type_: TensorType) -> Tensor:
        """Memory of our own for what a caller brings."""
        tensor = torch.zeros(type_.shape, dtype=type_.torch_dtype, device=self._device)
        tensor = tensor.contiguous(memory_format=MEMORY_FORMATS[type_.layout])
        self._program.values[name] = tensor
        return tensor

    @torch.no_grad()
    def refresh(self, state: Mapping[str, Tensor]) -> None:
        """Takes parameters and buffers by name and computes everything that follows from them."""
        self._enter()
        names = [name for name, _ in (*self.graph.parameters, *self.graph.buffers)]
        addresses = tuple(state[name].data_ptr() for name in names)
        if addresses != self._addresses:
            self._passes.clear()
            self._direct.clear()
            self._copies = self._placed({name: state[name].detach() for name in names})
            self._addresses = addresses
            self._weights = [self._program.values[name] for name in names]
            self._places = [*map(Tensor.data_ptr, self._weights)]
        if self._copies or self._program.refreshes:
            self._replay("refresh", self._run_refresh)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs, in memory that is the caller's. Buffers that the graph updates are updated.

        Inputs must be detached and of the graph's shapes and dtypes; they are read, never written.
        """
        return self.taken(self.launch(*inputs))

    def launch(self, *inputs: Tensor) -> Results:
        """Starts a forward pass, whose results are in memory that the next one overwrites."""
        self._enter()
        direct = self._direct_pass(inputs)
        if direct is not None:
            direct.graph.replay()
            return direct.results
        for own, tensor in zip(self._inputs, inputs, strict=True):
            own.copy_(tensor)
        return self._replay("forward", self._program.run_forward)

    def holds_its_weights(self) -> bool:
        """Whether they still are where graphs read them: storages may be resized under us."""
        return [*map(Tensor.data_ptr, self._weights)] == self._places

    def taken(self, results: Results) -> tuple[Tensor, ...]:
        """The outputs of a pass, in memory that is the caller's."""
        return tuple([_taken(results[name]) for name in self.graph.outputs])

    @torch.no_grad()
    def backward(self, *output_gradients: Tensor) -> dict[str, Tensor]:
        """The gradients by the name of their input or parameter, in memory that is the caller's."""
        self._enter()
        for own, tensor in zip(self._gradients, output_gradients, strict=True):
            own.copy_(tensor)
        results = self._replay("backward", self._program.run_backward)
        return {target: _taken(results[value]) for target, value in self.graph.gradients}

    def forget(self) -> None:
        """Nothing: the graphs keep their memory from pass to pass."""

    def _enter(self) -> None:
        """Orders this call behind the last one, which may have been on another stream.

        A capture of the caller's cannot wait for work outside of it; ordering is the caller's then.
        """
        raw = _raw_stream(self._device.index)
        if raw == self._raw_stream or torch.cuda.is_current_stream_capturing():
            return
        current = torch.cuda.current_stream(self._device)
        if self._stream is not None:
            current.wait_stream(self._stream)
        self._stream, self._raw_stream = current, raw

    def _placed(self, state: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Puts the weights in place; returns what each refresh copies because it lies otherwise."""
        moving = {buffer for buffer, _ in self.graph.updates}
        copies = []
        for name, tensor in state.items():
            if name in moving or tensor.is_contiguous():
                self._program.values[name] = tensor
            else:
                own = torch.empty_like(tensor, memory_format=torch.contiguous_format)
                self._program.values[name] = own
                copies.append((own, tensor))
        return copies

    def _run_refresh(self) -> None:
        for own, tensor in self._copies:
            own.copy_(tensor)
        self._program.run_refresh()

    def _replay(self, name: str, run: Callable[[], None]) -> Results:
        """The results of one pass, which becomes a part of a capture that the caller has begun."""
        if torch.cuda.is_current_stream_capturing():
            run()
            return self._program.values
        if name not in self._passes:
            self._passes[name] = self._captured(name, run)
        self._passes[name].graph.replay()
        return self._passes[name].results

    def _direct_pass(self, inputs: tuple[Tensor, ...]) -> Pass | None:
        """The forward pass from the caller's memory; None where that does not pay or is no good."""
        if not self._may_be_direct(inputs):
            return None
        addresses = tuple([tensor.data_ptr() for tensor in inputs])
        if addresses in self._direct:
            return self._direct[addresses]
        self._repeats = self._repeats + 1 if addresses == self._last_inputs else 0
        self._last_inputs = addresses
        if self._repeats < DIRECT_AFTER or len(self._direct) == self._most_direct:
            return None
        try:
            self._direct[addresses] = self._captured_at(inputs)
        except (CaptureError, torch.OutOfMemoryError):
            self._most_direct = len(self._direct)  # the graph that there is reads a copy
        return self._direct.get(addresses)

    def _may_be_direct(self, inputs: tuple[Tensor, ...]) -> bool:
        """Not where a backward pass would read the input later, when the caller has changed it."""
        if self.graph.backward_from is not None or torch.cuda.is_current_stream_capturing():
            return False
        return [tensor.stride() for tensor in inputs] == self._strides

    def _captured_at(self, inputs: tuple[Tensor, ...]) -> Pass:
        """The forward pass that reads its inputs where they are now."""
        values, names = self._program.values, [name for name, _ in self.graph.inputs]
        values.update(zip(names, inputs, strict=True))
        try:
            return self._captured("forward", self._program.run_forward)
        finally:
            values.update(zip(names, self._inputs, strict=True))

    @torch.no_grad()
    def _captured(self, name: str, run: Callable[[], None]) -> Pass:
        """The pass as a graph; raises CaptureError. Whatever happens, nothing else has changed."""
        current = torch.cuda.current_stream(self._device)
        moved = {buffer: self._program.values[buffer].clone() for buffer, _ in self.graph.updates}
        if not self._passes and not self._direct:
            # torch captures nothing into a pool whose graphs are all gone.
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with _one_capture, no_collection(), torch.cuda.device(self._device):
                self._capture(graph, run, current)
        except BaseException as error:
            with torch.cuda.device(self._device):
                self._recover(current)
            if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError):
                raise
            raise CaptureError(f"{self.plan.network}: the {name} pass: {error}") from error
        finally:
            current.wait_stream(self._side)
            for buffer, before in moved.items():
                self._program.values[buffer].copy_(before)
        values = self._program.values
        return Pass(graph, {name: values[name] for name in self.graph.results if name in values})

    def _capture(
        self, graph: torch.cuda.CUDAGraph, run: Callable[[], None], current: torch.cuda.Stream
    ) -> None:
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            for _ in range(WARM_UP_PASSES):
                run()
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            # torch ends the process where a capture finds no room for the state of random numbers.
            # This raises instead, and leaves the room; torch.cuda.graph would give it back.
            torch.empty(1 << 14, dtype=torch.uint8, device=self._device)
            # Other threads may go on calling CUDA while this one captures.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()

    def _recover(self, current: torch.cuda.Stream) -> None:
        """After a capture that broke, torch is still on its stream, allocates for it, keeps that
        memory, and draws no random number outside of it. The last is mended by a capture that
        succeeds.
        """
        torch.cuda.set_stream(current)
        try:
            _end_allocation(self._device.index, self._pool)
            _release_pool(self._device.index, self._pool)
        except RuntimeError:
            return  # It had not begun, or it ended.
        # On the side: next to the spare tensor that capture has room for its random numbers.
        torch.cuda.set_stream(self._side)
        with suppress(RuntimeError), _one_capture:
            spare = torch.zeros(1, device=self._device)
            with torch.cuda.graph(
                torch.cuda.CUDAGraph(), stream=self._side, capture_error_mode="thread_local"
            ):
                spare.add_(1)
        torch.cuda.set_stream(current)


def _taken(result: Tensor) -> Tensor:
    """A result as the caller may keep and change it; the next pass overwrites our own."""
    return result.clone(memory_format=torch.contiguous_format)


def program_on(
    device: torch.device, graph: Graph, plan: Plan, space: SearchSpace
) -> Program | CapturedProgram:
    """The plan made runnable on a device."""
    # Where there is nothing to compute there is nothing to capture, either.
    captured = device.type == "cuda" and all(type_.numel for _, type_ in graph.inputs)
    kind = CapturedProgram if captured else Program
    with _current(device):
        return kind(graph, plan, space, device)


@contextmanager
def _current(device: torch.device) -> Iterator[None]:
    """Inside, kernels are loaded on `device`, whichever GPU and thread they are asked from."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        # The driver wants a context, which a thread gets with its first work by the runtime.
        torch.zeros(1, device=device)
        yield
