"""What the families of recurrent layers over sequences share: one launch runs a whole sequence, and
its blocks wait for each other.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from plantune.cuda.kernel import Kernel
from plantune.graph.ops import op_named
from plantune.kernels.constants import rows_of
from plantune.kernels.cuda_family import Arch, Attrs, CudaFamily, Step, first_reason, refuse
from plantune.kernels.family import Binding, Frame
from plantune.kernels.scan_division import THREADS, Division, Sequence, sequence_of
from plantune.kernels.vector_kernel import ELEMENTS

SOURCE = """#include "cuda/{name}.h"
struct Sizes {{
  using T = {element};
  static constexpr int kHidden = {hidden}, kUnits = {units}, kSamples = {samples};
}};
using Kernel = plantune::{kernel}<Sizes>;
static_assert(sizeof(Kernel::Arguments) == {argument_bytes}, "arguments as in Python");
static_assert(Kernel::kSharedBytes == {shared_bytes}, "shared memory as the launch asks for it");
extern "C" __global__ __launch_bounds__({threads}, 1) void run(Kernel::Arguments arguments) {{
  Kernel::run(arguments);
}}
"""
Run = Callable[[dict[str, Tensor], Callable[[dict[str, Tensor]], None]], None]


class ScanFamily(CudaFamily[Sequence]):
    """Config: a block has so many `units` of the hidden ones, of so many `samples`."""

    inputs: ClassVar[tuple[str, ...]]  # by what they are; the last one need not be there
    outputs: ClassVar[tuple[str, ...]]
    written: ClassVar[tuple[str, ...]]  # those of them that the kernel makes, asked for or not
    kernel: ClassVar[str]  # in the header of the family's name
    arguments: ClassVar[type[ctypes.Structure]]
    of_gradient: ClassVar[bool] = False

    def read(self, step: Step) -> Sequence:
        refuse({f"only a {self.name} alone": step.ops != (self.name,)})
        (node,) = step.nodes
        names = dict(zip(self.inputs, node.inputs, strict=False))
        names |= dict(zip(self.outputs, node.outputs, strict=True))
        sequence = sequence_of(step, names)
        refuse(sequence.why_not())
        return sequence

    def division(self, parts: Sequence, config: Attrs) -> Division:
        return Division(parts, config["units"], config["samples"], self.of_gradient)

    def why_not_config(self, parts: Sequence, config: Attrs, arch: Arch) -> str | None:
        reason = super().why_not_config(parts, config, arch)
        return reason or first_reason(self.division(parts, config).why_not(arch))

    def threads(self, parts: Sequence, config: Attrs) -> int:
        return THREADS

    def shared_bytes(self, parts: Sequence, config: Attrs, arch: Arch) -> int:
        return self.division(parts, config).shared_bytes

    def steps_us(self, parts: Sequence, config: Attrs, arch: Arch) -> float:
        """A guess at the time of all steps."""
        cost, divided = arch.cost(self.name), self.division(parts, config)
        read = divided.samples * parts.hidden * divided.words_of_column / parts.per
        room = arch.chip.multiprocessors if arch.chip else divided.blocks
        waves = math.ceil(divided.blocks / room)
        return parts.steps * waves * (cost["step_us"] + read / cost["values_per_us"])

    def estimate_us(self, parts: Sequence, config: Attrs, arch: Arch) -> float:
        steps = self.steps_us(parts, config, arch) * self.slowdown(parts, arch)
        return arch.cost(self.name)["launch_us"] + steps

    def source(self, parts: Sequence, config: Attrs, arch: Arch) -> str:
        return SOURCE.format(
            name=self.name,
            kernel=self.kernel,
            element=ELEMENTS[parts.dtype],
            hidden=parts.hidden,
            units=config["units"],
            samples=config["samples"],
            argument_bytes=ctypes.sizeof(self.arguments),
            shared_bytes=self.division(parts, config).shared_bytes,
            threads=THREADS,
        )

    def rooms(self, parts: Sequence, frame: Frame) -> Mapping[str, Tensor]:
        """Memory of a launch beside the step's values, by what it is."""
        return {}

    def _spare(self, parts: Sequence, device: torch.device) -> dict[str, Tensor]:
        """Memory for what nobody asked for."""
        types, leaving = parts.step.types, dict(parts.step.outputs)
        missing = {w: types[n] for w in self.written if (n := parts.names[w]) not in leaving}
        return {
            word: torch.empty(type_.shape, dtype=type_.torch_dtype, device=device)
            for word, type_ in missing.items()
        }

    def around(self, at: dict[str, Tensor], run: Callable[[], None]) -> None:
        """Runs the kernel, between what else belongs to a launch."""
        run()

    def bind(self, parts: Sequence, config: Attrs, frame: Frame) -> Binding:
        divided = self.division(parts, config)
        kernel = Kernel(frame.built, cooperative=divided.waits)
        if divided.waits and not _fits(kernel, divided):
            return Binding(_by_torch(parts, frame))
        constants, exchange = rows_of(parts.step, frame), _exchange(divided, frame.device)
        rooms = {**self.rooms(parts, frame), **self._spare(parts, frame.device)}
        sizes, grid = {"steps": parts.steps, "samples": parts.samples}, (divided.blocks, 1, 1)
        leaving = dict(parts.step.outputs)
        there = {w: n for w, n in parts.names.items() if w in self.inputs or n in leaving}
        members = [field[0] for field in self.arguments._fields_ if field[0] not in sizes]

        def launch(stream: int) -> None:
            at = {word: constants.tensor(name) for word, name in there.items()}
            at = {**rooms, **at, **exchange}

            def run() -> None:
                found = {name: at[name].data_ptr() for name in members if name in at}
                arguments = [self.arguments(**found, **sizes)]
                shared_bytes = divided.shared_bytes
                kernel.launch(stream, grid, THREADS, arguments, shared_bytes=shared_bytes)

            self.around(at, run)

        return Binding(launch, constants=constants.all)


def structure(of_scan: tuple[str, ...], own: tuple[str, ...]) -> type[ctypes.Structure]:
    """The arguments of a kernel: pointers and sizes that each kind of cell has, then its own."""
    scan = [(name, ctypes.c_void_p) for name in of_scan]
    sizes = [(name, ctypes.c_int) for name in ("steps", "samples")]
    fields = (*scan, *sizes, *((name, ctypes.c_void_p) for name in own))
    return type("Arguments", (ctypes.Structure,), {"_fields_": fields})


def _fits(kernel: Kernel, divided: Division) -> bool:
    """Whether all blocks run at once."""
    return kernel.blocks_at_once(THREADS, divided.shared_bytes) >= divided.blocks


def _exchange(divided: Division, device: torch.device) -> dict[str, Tensor]:
    """What blocks of a launch tell each other. It outlives a launch: tags tell launches apart, and
    begin with zeros.
    """
    words = torch.zeros(divided.words, 4, dtype=torch.int32, device=device)
    return {"words": words, "launches": torch.zeros(1, dtype=torch.int64, device=device)}


def _by_torch(parts: Sequence, frame: Frame) -> Callable[[int], None]:
    """Where not all blocks fit beside each other, as on a part of a GPU."""
    (node,), values = parts.step.nodes, frame.values
    leaving = dict(parts.step.outputs)

    def launch(stream: int) -> None:
        inputs = [values[name] for name in node.inputs]
        made = op_named(node.op).evaluate(inputs, node.attrs)
        for name, tensor in zip(node.outputs, made, strict=True):
            if name in leaving:
                values[name].copy_(tensor)

    return launch
