"""Where a pass meets its caller: inputs and outputs, in the caller's memory if possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from plantune.cuda.patches import Patch
from plantune.cuda.recording import recorded
from plantune.errors import CaptureError
from plantune.graph.types import TensorType
from plantune.runtime.program import Program
from plantune.runtime.recorder import Recorded
from plantune.runtime.torch_internals import empty_on_gpu

# Kernels were chosen for addresses like that of the program's own memory.
ALIGNMENT_BYTES = 16


class End:
    """An input or output. `own` is where the captured kernels look for it.

    With patches, the few kernels that touch it are told of another address before the graph is
    launched; without, it is copied.
    """

    def __init__(self, name: str, own: Tensor) -> None:
        self.name, self.own = name, own
        self._strides = own.stride()
        self._wide = [axis for axis, size in enumerate(own.shape) if size > 1]
        self._patches: list[Patch] = []
        self._address = own.data_ptr()

    @property
    def moves(self) -> bool:
        return bool(self._patches)

    def lies_as(self, tensor: Tensor) -> bool:
        """Whether the tensor's elements lie as the kernels expect them."""
        strides = tensor.stride()
        if strides == self._strides:
            return True
        # Those of axes of one element mean nothing.
        return all(strides[axis] == self._strides[axis] for axis in self._wide)

    def fits(self, tensor: Tensor) -> bool:
        """Whether the kernels can work on the tensor itself."""
        return self.lies_as(tensor) and not tensor.data_ptr() % ALIGNMENT_BYTES

    def patch(self, patches: list[Patch] | None) -> None:
        self._patches, self._address = patches or [], self.own.data_ptr()

    def move(self, tensor: Tensor) -> bool:
        """Whether the next launch finds the end in this tensor."""
        if not self._patches or not self.fits(tensor):
            return False
        self._move_to(tensor.data_ptr())
        return True

    def move_back(self) -> None:
        """The next launch finds the end in the program's own memory."""
        if self._patches:
            self._move_to(self.own.data_ptr())

    def _move_to(self, address: int) -> None:
        if address != self._address:
            self._address = -1  # nobody knows where, should a patch fail
            for patch in self._patches:
                patch.move(address)
            self._address = address


class Ends:
    """All inputs and outputs of a program's forward pass."""

    def __init__(self, program: Program, inputs: Sequence[Tensor]) -> None:
        graph, values = program.graph, program.values
        self._program = program
        names = [name for name, _ in graph.inputs]
        self._inputs = [End(name, own) for name, own in zip(names, inputs, strict=True)]
        # A backward pass reads what the forward pass left in the program's memory.
        alone = graph.backward_from is None
        once = [name for name in graph.outputs if graph.outputs.count(name) == 1]
        # What is copied after the steps must lie where that copy reads it.
        copied = {value for _, value in graph.updates} | {*names} & {*graph.outputs}
        self._direct = [
            name
            for name in dict.fromkeys((*names, *once))
            if alone and name not in copied and program.touching(name) and name in values
        ]
        self._outputs = {name: End(name, values[name]) for name in once if name in self._direct}
        self._new: list[Callable[[], Tensor]] = []
        self.follow(())

    def follow(self, state: Sequence[Tensor]) -> None:
        """Outputs come in the layout that torch would choose: channels_last if the first input or a
        filter has it.
        """
        images = [*state, *(end.own for end in self._inputs)]
        layout = "nhwc" if any(map(_is_channels_last, images)) else "nchw"
        types = [self._program.graph.types[name] for name in self._program.graph.outputs]
        self._new = [self._maker(type_, layout) for type_ in types]
        self._settle()

    def _maker(self, type_: TensorType, layout: str) -> Callable[[], Tensor]:
        """Makes memory for a caller."""
        strides = type_.strides(layout if len(type_.shape) == 4 else "nchw")
        if self._program.device.type != "cuda":
            return partial(torch.empty_strided, type_.shape, strides, dtype=type_.torch_dtype)
        return partial(empty_on_gpu, type_.shape, strides, type_.torch_dtype)

    def find_patches(self, graph: Recorded) -> None:
        """Looks for the kernels of a captured pass that must be told of other addresses."""
        nodes = graph.nodes()
        for end in (*self._inputs, *self._outputs.values()):
            labels = self._program.touching(end.name) if end.name in self._direct else ()
            if nodes is None or not labels:
                end.patch(None)
                continue
            values, other = self._program.values, torch.empty_like(end.own)
            values[end.name] = other
            try:
                with recorded(only=True) as elsewhere:
                    for label in labels:
                        self._program.run_step(label)
            finally:
                values[end.name] = end.own
            end.patch(nodes.patches(elsewhere, (end.own.data_ptr(), other.data_ptr()), labels))
        self._settle()

    def _settle(self) -> None:
        """Which outputs the next passes write in the caller's memory, and which are copied."""
        names = self._program.graph.outputs
        ends = [(self._outputs.get(name), place) for place, name in enumerate(names)]
        self._written = [
            (end, place)
            for end, place in ends
            if end is not None and end.moves and end.lies_as(self._new[place]())
        ]
        written = {place for _, place in self._written}
        self._copied = [(place, name) for place, name in enumerate(names) if place not in written]

    def meet(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Brings the inputs to where the next launch reads them; memory for its outputs."""
        for end, tensor in zip(self._inputs, inputs, strict=True):
            if not end.move(tensor):
                end.move_back()
                with torch.no_grad():
                    end.own.copy_(tensor)
        outputs = tuple([new() for new in self._new])
        for end, place in self._written:
            if not end.move(outputs[place]):
                raise CaptureError(f"an output is not aligned to {ALIGNMENT_BYTES} bytes")
        return outputs

    def leave(self, outputs: Sequence[Tensor], results: Mapping[str, Tensor]) -> None:
        """Copies those outputs that the pass did not write where the caller has them."""
        for place, name in self._copied:
            outputs[place].copy_(results[name])

    def inside_a_capture(
        self, inputs: Sequence[Tensor], run: Callable[[], None]
    ) -> tuple[Tensor, ...]:
        """Runs a pass as a part of the caller's capture, in the caller's memory where possible."""
        values, names = self._program.values, self._program.graph.outputs
        before = {name: values[name] for name in self._direct}
        for end, tensor in zip(self._inputs, inputs, strict=True):
            if end.name in self._direct and end.fits(tensor):
                values[end.name] = tensor
            else:
                end.own.copy_(tensor)
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


def _is_channels_last(tensor: Tensor) -> bool:
    if tensor.dim() != 4 or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=torch.channels_last)
