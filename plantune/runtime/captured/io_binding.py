"""Binds a pass to the inputs and outputs of a call: in the caller's memory if possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import c_void_p
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor

from plantune.devices.cuda.patches import Executable, Patch
from plantune.devices.cuda.recording import recorded
from plantune.errors import CaptureError
from plantune.graph.tracing.eager_strides import Strides
from plantune.graph.types import TensorType
from plantune.kernels.cuda.image_layout import LayoutChange
from plantune.runtime.captured.claims import ALIGNMENT_BYTES, claim
from plantune.runtime.captured.recorder import Recorded
from plantune.runtime.program.program import Program
from plantune.runtime.program.result_strides import ResultStrides
from plantune.runtime.watched.torch_internals import empty_on_gpu

LaunchGraph = Callable[[c_void_p], None]
Direct = Callable[[Sequence[Tensor], c_void_p], tuple[Tensor, ...] | None]


class BoundTensor:
    """An input or output. `own` is where the captured kernels look for it.

    If it `moves`, the few kernels that touch it can be given another address before the graph is
    launched; else it is copied. `own` has no memory while it is dropped.
    """

    def __init__(self, name: str, own: Tensor) -> None:
        self.name, self.own = name, own
        self.moves = False
        self._memory, self._size_bytes = own.untyped_storage(), own.untyped_storage().nbytes()
        self.strides = own.stride()
        self._wide = [axis for axis, size in enumerate(own.shape) if size > 1]

    def has_layout(self, tensor: Tensor) -> bool:
        """Whether the tensor's elements are stored as the kernels expect."""
        strides = tensor.stride()
        if strides == self.strides:
            return True
        # Those of axes of one element mean nothing.
        return all(strides[axis] == self.strides[axis] for axis in self._wide)

    def fits(self, tensor: Tensor) -> bool:
        """Whether the kernels can work on the tensor itself."""
        return self.has_layout(tensor) and not tensor.data_ptr() % ALIGNMENT_BYTES

    def drop(self) -> None:
        """Frees the memory of `own`, which is its alone, until something must be copied there."""
        self._memory.resize_(0)

    def is_dropped(self) -> bool:
        return self._memory.nbytes() < self._size_bytes

    def allocate(self) -> None:
        """Has memory for what is copied, and for the kernels of a new capture."""
        if self.is_dropped():
            self._memory.resize_(self._size_bytes)

    def address_of(self, tensor: Tensor) -> int:
        """Where kernels find these elements: the tensor's own, or a copy in `own`."""
        # Without a call for most.
        if self.moves and (tensor.stride() == self.strides or self.has_layout(tensor)):
            address = tensor.data_ptr()
            if not address % ALIGNMENT_BYTES:
                return address
        self.allocate()
        with torch.no_grad():
            self.own.copy_(tensor)
        return self.own.data_ptr()


class IoBinding:
    """What a caller brings to a pass, and the outputs of the forward pass."""

    def __init__(self, program: Program, inputs: Sequence[Tensor], phase: str = "forward") -> None:
        graph, values = program.graph, program.values
        self._program, self._phase = program, phase
        forward = phase == "forward"
        names = [name for name, _ in (graph.inputs if forward else graph.output_gradients)]
        self._names = graph.outputs if forward else ()
        self._inputs = [BoundTensor(name, own) for name, own in zip(names, inputs, strict=True)]
        once = [name for name in self._names if self._names.count(name) == 1]
        # What a backward pass reads stays in the program's memory, and what is copied after the
        # steps must be where that copy reads it.
        copied = {value for _, value in graph.updates} | {*names} & {*graph.outputs}
        kept_inside = copied | {*graph.saved}
        self._direct = [
            name
            for name in dict.fromkeys((*names, *once))
            if name not in kept_inside and program.touching(name, phase) and name in values
        ]
        self._outputs = {
            name: BoundTensor(name, values[name]) for name in once if name in self._direct
        }
        self._new: list[Callable[[], Tensor]] = []
        # In which outputs come where no more is known, and the last ones that were asked for.
        self._layout = "nchw"
        self._result_strides: ResultStrides | None = None
        self._asks = False
        self._wanted: Sequence[Strides] | None = None
        self._launch: LaunchGraph = _nothing
        # What gives the kernels of a bound tensor another address.
        self._patched: dict[str, list[Patch]] = {}
        # Of inputs, written outputs and those that were written before, which go back to where they
        # are copied from: these patches, and where kernels look for them now.
        self._moves: list[list[Patch]] = []
        self._addresses: list[int] = []
        self._back: list[int] = []
        self._redirected: set[str] = set()
        # What copies outputs into another layout, by their index, as they came at the capture.
        self._changes: dict[int, LayoutChange | None] = {}
        # The strides of the input for which outputs come as they do now.
        self._asked_of: Strides = None
        # Launches a pass of one input and one output, neither of which is copied, and gives what it
        # writes; None of another one.
        self.direct: Direct = _none
        self.follow(())

    def follow(self, state: Sequence[Tensor]) -> None:
        """Where eager was not asked, outputs come in the layout that torch would likely choose:
        channels_last if the first input or a filter has it.
        """
        images = [*state, *(bound.own for bound in self._inputs)]
        self._layout = "nhwc" if any(map(_is_channels_last, images)) else "nchw"
        self._lay_out()

    def come_as(self, strides: ResultStrides | None) -> None:
        """Outputs come with these strides from now on."""
        self._result_strides = strides
        self._asks = strides is not None and not strides.rows
        self._wanted = None if strides is None or self._asks else strides.rows
        self._lay_out()

    def _ask(self, inputs: Sequence[Tensor]) -> None:
        """Outputs come as they do in eager for these inputs."""
        assert self._result_strides is not None
        wanted = self._result_strides.of(inputs)
        if wanted is not self._wanted:
            self._wanted, self._asked_of = wanted, inputs[0].stride() if inputs else None
            self._lay_out()

    def _lay_out(self) -> None:
        types = [self._program.graph.types[name] for name in self._names]
        if self._wanted is None:
            layouts = [self._layout if len(type_.shape) == 4 else "nchw" for type_ in types]
            every = [t.strides(layout) for t, layout in zip(types, layouts, strict=True)]
        else:
            pairs = zip(types, self._wanted, strict=True)
            every = [t.strides("nchw") if strides is None else strides for t, strides in pairs]
        self._new = [self._maker(t, strides) for t, strides in zip(types, every, strict=True)]
        self._strides = every
        self._settle()
        self.direct = self._direct_pass()

    def _maker(self, type_: TensorType, strides: tuple[int, ...]) -> Callable[[], Tensor]:
        """Makes memory for a caller."""
        if self._program.device.type != "cuda":
            return partial(torch.empty_strided, type_.shape, strides, dtype=type_.torch_dtype)
        return partial(empty_on_gpu, type_.shape, strides, type_.torch_dtype)

    def allocate(self) -> None:
        """Before a capture: kernels must find inputs that make sense, such as valid indices."""
        for bound in self._inputs:
            if bound.is_dropped():
                bound.allocate()
                bound.own.zero_()

    def drop(self) -> None:
        """Frees the places of inputs that kernels read where a caller has them: 704 MiB of 8,192
        images of 11 planes. What must be copied later gets one again.
        """
        for bound in self._inputs:
            if bound.moves:
                bound.drop()

    def serve(self, graph: Recorded) -> None:
        """Takes a captured pass, and looks for its kernels that must be given other addresses."""
        executable = graph.executable if self._direct else None
        every = [*self._inputs, *self._outputs.values()]
        found = {bound.name: self._patches(bound, executable, bound.own) for bound in every}
        for bound in every:
            bound.moves = bool(found[bound.name])
        self._patched, self._redirected = found, set()
        self._settle()
        self._changes = {
            index: self._program.change_of(name, self._strides[index])
            for index, name in self._copied
        }
        self._launch = graph.launch
        self.direct = self._direct_pass()

    def _patches(
        self, bound: BoundTensor, executable: Executable | None, here: Tensor
    ) -> list[Patch]:
        """What moves a bound tensor that was captured `here`; empty if it cannot be moved."""
        direct = bound.name in self._direct
        labels = self._program.touching(bound.name, self._phase) if direct else ()
        if executable is None or not labels:
            return []
        values, other = self._program.values, torch.empty_like(bound.own)
        values[bound.name] = other
        try:
            with recorded(only=True) as elsewhere:
                for label in labels:
                    self._program.run_step(label)
        finally:
            values[bound.name] = bound.own
        return executable.patches(elsewhere, (here.data_ptr(), other.data_ptr()), labels) or []

    def _settle(self) -> None:
        """Which outputs the next passes write in the caller's memory, and which are copied."""
        every = [(self._outputs.get(name), index) for index, name in enumerate(self._names)]
        self._written = [
            index
            for bound, index in every
            if bound is not None and bound.moves and bound.has_layout(self._new[index]())
        ]
        self._copied = [
            (index, name) for index, name in enumerate(self._names) if index not in self._written
        ]
        written = [self._names[index] for index in self._written]
        back = sorted(self._redirected.difference(written))
        self._back = [self._outputs[name].own.data_ptr() for name in back]
        names = (*(bound.name for bound in self._inputs), *written, *back)
        self._moves = [self._patched.get(name, []) for name in names]
        self._addresses = []

    def bind(self, inputs: Sequence[Tensor]) -> tuple[LaunchGraph, tuple[Tensor, ...]]:
        """What launches the pass on these inputs, and memory for its outputs."""
        if self._asks:
            self._ask(inputs)
        addresses = [
            bound.address_of(tensor) for bound, tensor in zip(self._inputs, inputs, strict=True)
        ]
        outputs = tuple([new() for new in self._new])
        for index in self._written:
            addresses.append(outputs[index].data_ptr())
        addresses += self._back
        if addresses != self._addresses:
            self._move(addresses)
        return self._launch, outputs

    def _direct_pass(self) -> Direct:
        """`bind` and the launch in one: for one image the host may need longer than the GPU."""
        one_to_one = len(self._inputs) == len(self._new) == 1 and self._written == [0]
        if not one_to_one or not self._inputs[0].moves:
            return _none
        strides, new, launch = self._inputs[0].strides, self._new[0], self._launch
        results = self._result_strides if self._asks else None
        if results is not None and (self._wanted is None or self._asked_of != strides):
            return _none
        reads, writes = ([patch.move for patch in patches] for patches in self._moves)
        redirected, (name,) = self._redirected, self._names
        addresses = self._addresses  # not `self`: a cycle would keep its memory

        def run(inputs: Sequence[Tensor], stream: c_void_p) -> tuple[Tensor, ...] | None:
            (x,) = inputs
            here = x.data_ptr()
            if here % ALIGNMENT_BYTES or x.stride() != strides:
                return None
            if results is not None and results.are_due:
                return None
            output = new()
            there = output.data_ptr()
            if addresses != [here, there]:
                _check_aligned(there)
                before, after = addresses or (None, None)
                addresses.clear()  # unknown if a patch fails
                redirected.add(name)
                for move in reads if before != here else ():
                    move(here)
                for move in writes if after != there else ():
                    move(there)
                addresses[:] = here, there
            launch(stream)
            return (output,)

        return run

    def _move(self, addresses: list[int]) -> None:
        """The next launch finds inputs and written outputs there.

        One executable graph is patched for each: with four of them, patched less often, 64 inputs
        of 128 images took 1.07 of one input's time, with one 1.02 (H200, 2026-11-28).
        """
        for address in addresses[len(self._inputs) :]:
            _check_aligned(address)
        before = [*self._addresses]
        self._addresses.clear()  # unknown if a patch fails
        self._redirected.update(self._names[index] for index in self._written)
        for patches, old, new in zip_longest(self._moves, before, addresses):
            for patch in patches if old != new else ():
                patch.move(new)
        self._addresses[:] = addresses

    def copy_out(
        self, outputs: Sequence[Tensor], results: Mapping[str, Tensor], stream: c_void_p
    ) -> None:
        """Copies those outputs that the pass did not write where the caller has them."""
        for index, name in self._copied:
            out, result, change = outputs[index], results[name], self._changes.get(index)
            if change is not None and change.turns(result, out):
                change.launch(stream.value or 0, out, result)
            else:
                out.copy_(result)

    def inside_a_capture(
        self, inputs: Sequence[Tensor], run: Callable[[], None]
    ) -> tuple[Tensor, ...]:
        """Runs a pass as a part of the caller's capture, in the caller's memory where possible."""
        if self._asks:
            self._ask(inputs)
        values, names = self._program.values, self._names
        before = {name: values[name] for name in self._direct}
        for bound, tensor in zip(self._inputs, inputs, strict=True):
            if bound.name in self._direct and bound.fits(tensor):
                values[bound.name] = tensor
                claim(tensor, partial(self._patches, bound, here=tensor))
            elif bound.is_dropped():  # memory of the capture's, which is its again after the pass
                values[bound.name] = torch.empty_like(bound.own).copy_(tensor)
            else:
                bound.own.copy_(tensor)
        outputs = tuple([new() for new in self._new])
        for name, output in zip(names, outputs, strict=True):
            if name in self._outputs and self._outputs[name].fits(output):
                values[name] = output
        try:
            run()
            for name, output in zip(names, outputs, strict=True):
                if values[name] is not output:
                    output.copy_(values[name])
        finally:
            values.update(before)
        return outputs


def _check_aligned(output: int) -> None:
    if output % ALIGNMENT_BYTES:
        raise CaptureError(f"an output is not aligned to {ALIGNMENT_BYTES} bytes")


def _none(inputs: Sequence[Tensor], stream: c_void_p) -> None:
    """Of passes with other inputs or outputs, and of what was not captured yet."""


def _nothing(stream: c_void_p) -> None:
    """What a pass launches that was not captured yet."""


def _is_channels_last(tensor: Tensor) -> bool:
    if tensor.dim() != 4 or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=torch.channels_last)
