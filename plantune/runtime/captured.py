"""A program on a GPU: each pass is one captured graph, replayed on the caller's stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from plantune.errors import CaptureError
from plantune.graph.graph import Graph
from plantune.memory import MEMORY_FORMATS
from plantune.plan import Plan
from plantune.runtime.program import Program
from plantune.space.search_space import SearchSpace

# Libraries choose algorithms and take workspaces in their first calls, which cannot be captured.
WARM_UP_PASSES = 2


class CapturedProgram:
    """A program's face over captured graphs.

    Inputs are copied into memory of its own, so a caller may free or change them after the call.
    Graphs read weights where they lie: one that moved is captured anew, one that changed in place
    is not. It may be called on any stream, from one thread at a time.
    """

    def __init__(self, graph: Graph, plan: Plan, space: SearchSpace, device: torch.device) -> None:
        self.graph = graph
        self.plan = plan
        self._program = Program(graph, plan, space, device)
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream | None = None
        self._addresses: tuple[int, ...] = ()
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._passes: dict[str, torch.cuda.CUDAGraph] = {}
        values = self._program.values
        for name, type_ in (*graph.inputs, *graph.output_gradients):
            values[name] = torch.zeros(type_.shape, dtype=type_.torch_dtype, device=device)
            values[name] = values[name].contiguous(memory_format=MEMORY_FORMATS[type_.layout])

    @torch.no_grad()
    def refresh(self, state: Mapping[str, Tensor]) -> None:
        """Takes parameters and buffers by name and computes everything that follows from them."""
        self._enter()
        names = [name for name, _ in (*self.graph.parameters, *self.graph.buffers)]
        addresses = tuple(state[name].data_ptr() for name in names)
        if addresses != self._addresses:
            self._passes.clear()
            self._copies = self._placed({name: state[name].detach() for name in names})
            self._addresses = addresses
        if self._copies or self._program.refreshes:
            self._replay("refresh", self._run_refresh)

    @torch.no_grad()
    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs, in memory that is the caller's. Buffers that the graph updates are updated.

        Inputs must have the graph's shapes and dtypes; they are read, never written.
        """
        self._enter()
        values = self._program.values
        for (name, _), tensor in zip(self.graph.inputs, inputs, strict=True):
            values[name].copy_(tensor)
        self._replay("forward", self._program.run_forward)
        return tuple(self._taken(name) for name in self.graph.outputs)

    @torch.no_grad()
    def backward(self, *output_gradients: Tensor) -> dict[str, Tensor]:
        """The gradients by the name of their input or parameter, in memory that is the caller's."""
        self._enter()
        values = self._program.values
        for (name, _), tensor in zip(self.graph.output_gradients, output_gradients, strict=True):
            values[name].copy_(tensor)
        self._replay("backward", self._program.run_backward)
        return {target: self._taken(value) for target, value in self.graph.gradients}

    def forget(self) -> None:
        """Nothing: the graphs keep their memory from pass to pass."""

    def _enter(self) -> None:
        """Orders this call behind the last one, which may have been on another stream.

        A capture of the caller's cannot wait for work outside of it; ordering is the caller's then.
        """
        if torch.cuda.is_current_stream_capturing():
            return
        current = torch.cuda.current_stream(self._device)
        if self._stream is not None and current != self._stream:
            current.wait_stream(self._stream)
        self._stream = current

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

    def _replay(self, name: str, run: Callable[[], None]) -> None:
        """One pass. Inside of a capture of the caller's it becomes a part of that."""
        if torch.cuda.is_current_stream_capturing():
            run()
            return
        if name not in self._passes:
            self._passes[name] = self._captured(name, run)
        self._passes[name].replay()

    def _captured(self, name: str, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        moved = {buffer: self._program.values[buffer].clone() for buffer, _ in self.graph.updates}
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._side):
                for _ in range(WARM_UP_PASSES):
                    run()
            # Other threads may go on calling CUDA while this one captures.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"
            ):
                run()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CaptureError(f"{self.plan.network}: the {name} pass: {error}") from error
        torch.cuda.current_stream(self._device).wait_stream(self._side)
        for buffer, before in moved.items():
            self._program.values[buffer].copy_(before)
        return graph

    def _taken(self, name: str) -> Tensor:
        """A result as the caller may keep and change it; the next pass overwrites our own."""
        return self._program.values[name].clone(memory_format=torch.contiguous_format)


def program_on(
    device: torch.device, graph: Graph, plan: Plan, space: SearchSpace
) -> Program | CapturedProgram:
    """The plan made runnable on a device."""
    kind = CapturedProgram if device.type == "cuda" else Program
    return kind(graph, plan, space, device)
