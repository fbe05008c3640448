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

from plantune.devices.cuda.kernel import Kernel
from plantune.kernels.cuda.cuda_family import Arch, Attrs, CudaFamily, Step, first_reason, refuse
from plantune.kernels.cuda.vector_kernel import ELEMENTS
from plantune.kernels.family import Binding, Frame
from plantune.kernels.recurrent.scan_division import THREADS, Division, Sequence, sequence_of
from plantune.kernels.recurrent.scan_launches import Launches
from plantune.kernels.weights.constants import rows_of

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
        blocks = divided.of_group * divided.groups
        room = arch.chip.multiprocessors if arch.chip else blocks
        waves = len(divided.launches(room)) if divided.waits else math.ceil(blocks / room)
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
        launches = Launches(kernel, divided, self.arguments, frame.device)
        constants = rows_of(parts.step, frame)
        rooms = {**self.rooms(parts, frame), **self._spare(parts, frame.device)}
        leaving = dict(parts.step.outputs)
        there = {w: n for w, n in parts.names.items() if w in self.inputs or n in leaving}

        def launch(stream: int) -> None:
            at = {**rooms, **{word: constants.tensor(name) for word, name in there.items()}}
            self.around(at, lambda: launches.run(stream, at))

        return Binding(launch, constants=constants.all)
