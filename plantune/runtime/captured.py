"""A program on a GPU: each pass is one captured graph, replayed on the caller's stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from plantune.errors import CaptureError
from plantune.graph.graph import Graph
from plantune.graph.types import TensorType
from plantune.memory import MEMORY_FORMATS
from plantune.plan import Plan
from plantune.runtime.program import Program
from plantune.runtime.recorder import Recorder
from plantune.space.search_space import SearchSpace

# Private, but what torch's own compiled graphs ask: 0.2 us instead of 2.7 (H200, 2026-11-20).
_raw_stream = getattr(
    torch._C,
    "_cuda_getCurrentRawStream",
    lambda index: torch.cuda.current_stream(index).cuda_stream,
)


Results = Mapping[str, Tensor]


@dataclass(frozen=True)
class Pass:
    """A captured pass, and the values that each replay writes anew in memory of its own."""

    graph: torch.cuda.CUDAGraph
    results: Results


class CapturedProgram:
    """A program's face over captured graphs.

    A pass computes all that it needs from the weights' own memory, in the order of the stream, so
    nothing of it can be out of date. Graphs read weights where they lie: one that moved is captured
    anew. Inputs are copied, outputs are allocated for each call: a caller may free or change either
    afterwards. It may be called on any stream, from one thread at a time.
    """

    keeps_copies = False

    def __init__(self, graph: Graph, plan: Plan, space: SearchSpace, device: torch.device) -> None:
        self.graph = graph
        self.plan = plan
        self._program = Program(graph, plan, space, device)
        self._device = device
        self._recorder = Recorder(device)
        self._stream: torch.cuda.Stream | None = None
        self._raw_stream: int | None = None
        self._state: list[Tensor] = []
        self._addresses: list[int] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._passes: dict[str, Pass] = {}
        self._inputs = [self._place(name, type_) for name, type_ in graph.inputs]
        self._gradients = [self._place(name, type_) for name, type_ in graph.output_gradients]
        self._new_outputs = [self._new(graph.types[name]) for name in graph.outputs]

    def _place(self, name: str, type_: TensorType) -> Tensor:
        """Memory of our own for what a caller brings."""
        tensor = torch.zeros(type_.shape, dtype=type_.torch_dtype, device=self._device)
        tensor = tensor.contiguous(memory_format=MEMORY_FORMATS[type_.layout])
        self._program.values[name] = tensor
        return tensor

    def _new(self, type_: TensorType) -> Callable[[], Tensor]:
        """Makes memory for a caller."""
        # torch.empty takes 1.4 us instead of 0.9 to see which of its forms is meant (2026-11-20).
        return partial(
            torch.empty_strided,
            type_.shape,
            type_.strides("nchw"),
            dtype=type_.torch_dtype,
            device=self._device,
        )

    @torch.no_grad()
    def refresh(self, state: Mapping[str, Tensor]) -> None:
        """Takes parameters and buffers by name, wherever they lie now."""
        names = [name for name, _ in (*self.graph.parameters, *self.graph.buffers)]
        addresses = [state[name].data_ptr() for name in names]
        # Those in place may have lost their memory, and others may have got it.
        in_place = [tensor.data_ptr() for tensor in self._state]
        if not addresses == in_place == self._addresses:
            self._passes.clear()
            self._state = [state[name].detach() for name in names]
            self._copies = self._placed(dict(zip(names, self._state, strict=True)))
            self._addresses = addresses

    @torch.no_grad()
    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs, in memory that is the caller's. Buffers that the graph updates are updated.

        Inputs must be detached and of the graph's shapes and dtypes; they are read, never written.
        """
        self._enter()
        outputs = tuple([new() for new in self._new_outputs])
        for own, tensor in zip(self._inputs, inputs, strict=True):
            own.copy_(tensor)
        results = self._run_forward()
        for output, name in zip(outputs, self.graph.outputs, strict=True):
            output.copy_(results[name])
        return outputs

    @torch.no_grad()
    def backward(self, *output_gradients: Tensor) -> dict[str, Tensor]:
        """The gradients by the name of their input or parameter, in memory that is the caller's."""
        self._enter()
        for own, tensor in zip(self._gradients, output_gradients, strict=True):
            own.copy_(tensor)
        results = self._replay("backward", self._program.run_backward)
        return {
            target: results[value].clone(memory_format=torch.contiguous_format)
            for target, value in self.graph.gradients
        }

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

    def _forward_pass(self) -> None:
        """All of a forward pass, with what follows from weights alone."""
        for own, tensor in self._copies:
            own.copy_(tensor)
        self._program.run_refresh()
        self._program.run_forward()

    def _run_forward(self) -> Results:
        first = self.graph.backward_from is not None and "backward" not in self._passes
        if first and not torch.cuda.is_current_stream_capturing():
            self._capture_both()
        return self._replay("forward", self._forward_pass)

    @torch.no_grad()
    def _capture_both(self) -> None:
        """Captures the backward pass beside the forward one: where that is not possible, the
        framework can still run both.
        """
        moved = self._moving()
        try:
            # Some kernels go astray on values that no forward pass has left, such as indices.
            self._replay("forward", self._forward_pass)
            self._passes["backward"] = self._captured("backward", self._program.run_backward)
        finally:
            self._restore(moved)

    def _moving(self) -> dict[str, Tensor]:
        """Copies of what passes update."""
        return {name: self._program.values[name].clone() for name, _ in self.graph.updates}

    def _restore(self, moved: Mapping[str, Tensor]) -> None:
        for buffer, before in moved.items():
            self._program.values[buffer].copy_(before)

    def _replay(self, name: str, run: Callable[[], None]) -> Results:
        """The results of one pass, which becomes a part of a capture that the caller has begun."""
        if torch.cuda.is_current_stream_capturing():
            run()
            return self._program.values
        if name not in self._passes:
            self._passes[name] = self._captured(name, run)
        self._passes[name].graph.replay()
        return self._passes[name].results

    @torch.no_grad()
    def _captured(self, name: str, run: Callable[[], None]) -> Pass:
        """The pass as a graph; raises CaptureError. Whatever happens, nothing else has changed."""
        values, moved = self._program.values, self._moving()
        try:
            graph = self._recorder.graph(run, first=not self._passes)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CaptureError(f"{self.plan.network}: the {name} pass: {error}") from error
        finally:
            self._restore(moved)
        return Pass(graph, {name: values[name] for name in self.graph.results if name in values})


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
