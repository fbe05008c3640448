"""A program on a GPU: each pass is one captured graph, replayed on the caller's stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from ctypes import c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from plantune.devices.cuda.flags import autotuned
from plantune.errors import CaptureError
from plantune.graph import TensorType
from plantune.graph.layouts import in_layout
from plantune.plans.checked_plan import CheckedPlan
from plantune.runtime.captured.current_gpu import on_its_gpu
from plantune.runtime.captured.handles import make_handles, this_thread
from plantune.runtime.captured.io_binding import IoBinding
from plantune.runtime.captured.recorder import Recorded, Recorder
from plantune.runtime.captured.rehearsal import is_rehearsing
from plantune.runtime.program.exchange import current_exchange
from plantune.runtime.program.gradients import Gradients
from plantune.runtime.program.program import Program, current_stream
from plantune.runtime.program.result_strides import ResultStrides
from plantune.runtime.program.skipped_steps import for_capture
from plantune.runtime.watched.torch_internals import is_capturing, raw_stream

Results = Mapping[str, Tensor]


@dataclass(frozen=True)
class Pass:
    """A captured pass, and the values that each replay writes anew in memory of its own."""

    graph: Recorded
    results: Results


class CapturedProgram:
    """A program's face over captured graphs.

    A pass computes all that it needs from the weights' own memory, in stream order, so that nothing
    can be out of date; with `frozen` that is done once, in `refresh`. Graphs hold the weights'
    addresses: after a weight moved, passes are captured again. Inputs are read and outputs written
    in the caller's memory if only kernels of ours touch them (see IoBinding); else they are copied.
    It may be called on any stream, from one thread at a time.
    """

    keeps_copies = False

    def __init__(
        self,
        checked: CheckedPlan,
        device: torch.device,
        *,
        frozen: bool = False,
    ) -> None:
        self.graph = graph = checked.graph
        self.plan = checked.plan
        self.captures = 0
        self._frozen = frozen
        # The gradients are gathered in one launch, which casts them too.
        fewer, self._counters = for_capture(checked)
        self._program = Program(fewer, device, seeds=True)
        self.device, self._index = device, device.index
        self._recorder = Recorder(device)
        self._stream: torch.cuda.Stream | None = None
        self._raw_stream, self._stream_handle = -1, c_void_p()
        self._state: list[Tensor] = []
        self._places: list[tuple[int, tuple[int, ...]]] = []
        self._passes: dict[str, Pass] = {}
        inputs = [self._place(*named) for named in graph.inputs]
        self._gradients = Gradients(self._program, checked.space.arch, device)
        seeds = [self._program.values[name] for name, _ in graph.output_gradients]
        self._result_strides: ResultStrides | None = None
        self._io = IoBinding(self._program, inputs)
        self._seeds = IoBinding(self._program, seeds, "backward")

    @property
    def result_strides(self) -> ResultStrides | None:
        return self._result_strides

    @result_strides.setter
    def result_strides(self, strides: ResultStrides | None) -> None:
        if strides is not self._result_strides:
            self._result_strides = strides
            self._io.come_as(strides)

    @property
    def held_bytes(self) -> int:
        """What its graphs and values take of the GPU's memory."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for name, tensor in self._program.values.items()
            if not any(tensor is own for own in self._state)
        }
        return sum(storages.values())

    def _place(self, name: str, type_: TensorType) -> Tensor:
        """Memory of our own for what a caller brings."""
        tensor = torch.zeros(type_.shape, dtype=type_.torch_dtype, device=self.device)
        self._program.values[name] = tensor = in_layout(tensor, self._program.layout_of(name))
        return tensor

    @on_its_gpu
    @torch.no_grad()
    def refresh(self, state: Mapping[str, Tensor]) -> None:
        """Takes parameters and buffers by name, wherever they are in memory now."""
        names = [name for name, _ in (*self.graph.parameters, *self.graph.buffers)]
        given = [state[name].detach() for name in names]
        places = [(tensor.data_ptr(), tensor.stride()) for tensor in given]
        # Those in place may have lost their memory, and others may have got it.
        in_place = [(tensor.data_ptr(), tensor.stride()) for tensor in self._state]
        if not places == in_place == self._places:
            self._passes.clear()
            self._state, self._places = given, places
            placed = dict(zip(names, given, strict=True))
            self._program.place(placed)
            self._gradients.follow(placed)
            self._io.follow(given)
        if self._frozen:
            self._enter()
            # A replayed pass waits for this stream, not for one that this might have forked.
            self._program.run_refresh(orders=True)

    @on_its_gpu
    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs, in memory that is the caller's. Buffers that the graph updates are updated.

        Inputs must be of the graph's shapes and dtypes; they are read, never written.
        """
        if is_capturing() or is_rehearsing():
            self._enter()
            return self._inside_a_capture(inputs)
        return self.replay(inputs)

    def replay(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """`forward`, if this program's GPU is the current one and no capture is under way."""
        if raw_stream(self._index) != self._raw_stream:
            self._enter()
        made = self._passes.get("forward") or self._capture_forward()
        direct = self._io.direct(inputs, self._stream_handle)
        if direct is not None:
            return direct
        launch, outputs = self._io.bind(inputs)
        launch(self._stream_handle)
        self._io.copy_out(outputs, made.results, self._stream_handle)
        return outputs

    @torch.no_grad()
    def _inside_a_capture(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        with self._autotuned():
            return self._io.inside_a_capture(inputs, lambda: self._forward_pass(orders=True))

    def _autotuned(self) -> AbstractContextManager[None]:
        """For passes that run launch by launch. In a capture cuDNN cannot try algorithms, and what
        it found it remembers in the thread that it ran in.
        """
        digest = self.plan.digest
        if not is_capturing():
            this_thread.plans.add(digest)
        deterministic = bool(self.plan.evidence.get("deterministic"))
        searches = digest in this_thread.plans
        return autotuned(deterministic=deterministic, searches=searches)

    @on_its_gpu
    @torch.no_grad()
    def backward(self, *output_gradients: Tensor, again: bool = True) -> dict[str, Tensor]:
        """The gradients by the name of their input or parameter, in memory that is the caller's.
        `again` says that another backward may follow.
        """
        self._enter()
        if is_capturing() or is_rehearsing():
            with (
                self._autotuned(),
                self._program.spared(again=again),
                self._gradients.in_new_memory(current_exchange()) as found,
            ):
                self._seeds.inside_a_capture(output_gradients, self._backward_pass)
                return {**found, **self._gradients.of_inputs(self._program.values)}
        make_handles(self._recorder.libraries)
        made = self._passes.get("backward") or self._capture_backward()
        launch, _ = self._seeds.bind(output_gradients)
        with self._program.spared(again=again):
            launch(self._stream_handle)
            return self._gradients.handed_over(made.results)

    def forget(self) -> None:
        """Nothing: the graphs keep their memory from pass to pass."""

    def _enter(self) -> None:
        """Orders this call after the last one, which may have been on another stream.

        A capture of the caller's cannot wait for work outside of it; ordering is the caller's then.
        """
        raw = raw_stream(self._index)
        if raw == self._raw_stream or is_capturing():
            return
        current = torch.cuda.current_stream(self.device)
        if self._stream is not None:
            current.wait_stream(self._stream)
        self._stream, self._raw_stream, self._stream_handle = current, raw, c_void_p(raw)

    def _forward_pass(self, *, orders: bool = False) -> None:
        """All of a forward pass, with what follows from weights alone."""
        if not self._frozen:
            self._program.run_refresh(orders=orders)
        self._program.run_forward()
        self._counters.count(self._program.values)

    def _backward_pass(self) -> None:
        """All of a backward pass, with its gradients side by side."""
        self._program.run_backward(self._gradients.report)
        self._gradients.gather(current_stream(self.device), self._program.values)

    def _both_passes(self) -> None:
        """Outside of a graph a backward pass runs after a forward pass outside: what torch saves of
        random numbers is on the host there, and on the GPU in a graph.
        """
        self._forward_pass()
        self._backward_pass()

    @torch.no_grad()
    def _capture_forward(self) -> Pass:
        """In training the backward pass too: if that is not possible, the framework can still
        run both.
        """
        self._io.allocate()
        if self.graph.backward_from is None:
            made = self._captured("forward", self._forward_pass, self._forward_pass)
            self._io.serve(made.graph)
            self._passes["forward"] = made  # with the patches of no other graph
            self._io.drop()
            return made
        try:
            made = self._captured("forward", self._forward_pass, self._both_passes)
            self._io.serve(made.graph)
            self._passes["forward"] = made
            self._capture_backward()
            self._io.drop()
            return made
        except BaseException:
            self._passes.clear()
            raise

    def _capture_backward(self) -> Pass:
        made = self._captured("backward", self._backward_pass)
        self._seeds.serve(made.graph)
        self._passes["backward"] = made
        return made

    def _moving(self) -> dict[str, Tensor]:
        """Copies of what passes update."""
        return {name: self._program.values[name].clone() for name, _ in self.graph.updates}

    def _restore(self, moved: Mapping[str, Tensor]) -> None:
        for buffer, before in moved.items():
            self._program.values[buffer].copy_(before)

    @torch.no_grad()
    def _captured(
        self, name: str, run: Callable[[], None], warm_up: Callable[[], None] | None = None
    ) -> Pass:
        """The pass as a graph, after a `warm_up`; raises CaptureError. Whatever happens, nothing
        else has changed.
        """
        values, moved = self._program.values, self._moving()
        try:
            with self._autotuned():
                graph = self._recorder.graph(run, first=not self._passes, warm_up=warm_up)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CaptureError(f"{self.plan.problem.network}: the {name} pass: {error}") from error
        finally:
            self._restore(moved)
        self.captures += 1
        results = self._program.graph.results
        return Pass(graph, {name: values[name] for name in results if name in values})


def program_on(
    device: torch.device, checked: CheckedPlan, *, frozen: bool = False
) -> Program | CapturedProgram:
    """The plan made runnable on a device."""
    # Nothing to compute, nothing to capture.
    captured = device.type == "cuda" and all(type_.numel for _, type_ in checked.graph.inputs)
    with _current(device):
        if captured:
            return CapturedProgram(checked, device, frozen=frozen)
        return Program(checked, device)


@contextmanager
def _current(device: torch.device) -> Iterator[None]:
    """Inside, kernels are loaded on `device`, whichever GPU and thread they are asked from."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        # The driver needs a context, which a thread gets with its first work by the runtime.
        torch.zeros(1, device=device)
        yield
