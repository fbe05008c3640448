"""Translation by a few launches for each word: `csrc/cuda/gru_translator/steps.h`.

For chips on which the blocks of gru_translate do not fit, or which have no kernel of it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from plantune.base.canonical import Attrs
from plantune.devices.cuda import driver
from plantune.devices.cuda.kernel import Kernel
from plantune.devices.cuda.loops import Loop, add_loop, can_loop
from plantune.devices.cuda.structs import fields
from plantune.graph.step import Step
from plantune.kernels.cuda.cuda_family import CudaFamily
from plantune.kernels.family import Binding, Frame
from plantune.kernels.legality import first_reason, refuse
from plantune.kernels.recurrent.translation import (
    Sentences,
    SharedArguments,
    reasons,
    sentences_of,
    shared_arguments,
)
from plantune.kernels.weights.constants import rows_of
from plantune.space.arch import Arch

UNIT_THREADS, ROW_THREADS = 128, 256
# Words of a turn of the loop: a turn costs some 4 us, a word after the end 2 (H200, 2026-11-23).
TURN = 4
VECTORS_MAX = 36  # of four weights each, that a thread holds
SAMPLES_MAX = 4096  # whose best words a block has in shared memory
KERNELS = {
    "begin": "begin(a)",
    "advance": "advance(a)",
    "add_context": "add_context(a)",
    "finish": "finish(a)",
}
SOURCE = """#include "cuda/gru_translator/steps.h"
struct Sizes {{
  static constexpr int kEmbedding = {embedding}, kHidden = {hidden};
  static constexpr int kTargets = {targets}, kRows = {rows};
}};
using Kernel = plantune::TranslateSteps<Sizes>;
using Arguments = plantune::StepArguments;
static_assert(sizeof(Arguments) == {argument_bytes}, "arguments as in Python");
static_assert(sizeof(plantune::StepState) <= {state_bytes}, "its state as in Python");
extern "C" __global__ void run(Arguments a, unsigned long long loop) {{ Kernel::choose(a, loop); }}
extern "C" __global__ void read_word(Arguments a, int at) {{ Kernel::read(a, at); }}
"""
ENTRY = 'extern "C" __global__ void {name}(Arguments a) {{ Kernel::{call}; }}\n'
STATE_BYTES = 16


class Arguments(SharedArguments):
    """plantune::StepArguments."""

    _fields_ = fields("hidden constant best word made counts state")


class GruTranslateSteps(CudaFamily[Sentences]):
    """Config: a warp has so many `rows` of the output layer."""

    name: ClassVar = "gru_translate_steps"
    # The kernels of a loop cannot be told of other addresses, and one graph with a loop is enough.
    launches_kernels: ClassVar = False

    def read(self, step: Step) -> Sentences:
        parts = sentences_of(step)
        refuse(
            {
                **reasons(parts),
                f"hidden units make whole vectors of 128, got {parts.hidden}": parts.hidden % 128,
                f"{parts.samples} sentences, {SAMPLES_MAX} fit": parts.samples > SAMPLES_MAX,
            }
        )
        return parts

    def why_not_config(self, parts: Sentences, config: Attrs, arch: Arch) -> str | None:
        vectors = (parts.embedding + parts.hidden) // 128
        held = vectors * max(3, config["rows"])
        reason = {f"a thread would hold {4 * held} weights": held > VECTORS_MAX}
        return super().why_not_config(parts, config, arch) or first_reason(reason)

    def threads(self, parts: Sentences, config: Attrs) -> int:
        return ROW_THREADS

    def shared_bytes(self, parts: Sentences, config: Attrs, arch: Arch) -> int:
        return 8 * parts.samples

    def estimate_us(self, parts: Sentences, config: Attrs, arch: Arch) -> float:
        """If no sentence ends before the last step."""
        cost, others = arch.cost(self.name), parts.samples - 1
        read = cost["read_us"] + others * cost["read_sample_us"]
        step = cost["step_us"] + others * cost["step_sample_us"]
        work = parts.length * read + int(parts.attrs["max_steps"]) * step
        return cost["launch_us"] + work * self.slowdown(parts, arch)

    def source(self, parts: Sentences, config: Attrs, arch: Arch) -> str:
        rendered = SOURCE.format(
            embedding=parts.embedding,
            hidden=parts.hidden,
            targets=parts.targets,
            rows=config["rows"],
            argument_bytes=ctypes.sizeof(Arguments),
            state_bytes=STATE_BYTES,
        )
        return rendered + "".join(ENTRY.format(name=n, call=call) for n, call in KERNELS.items())

    def bind(self, parts: Sentences, config: Attrs, frame: Frame) -> Binding:
        launches = _Launches(parts, config, frame)
        return Binding(launches.run, constants=launches.constants.all)


@dataclass(frozen=True)
class _Grids:
    """Blocks of each kernel."""

    units: int
    constants: int
    rows: int

    @staticmethod
    def of(parts: Sentences, rows: int) -> _Grids:
        warps = ROW_THREADS // 32
        return _Grids(
            parts.hidden // (UNIT_THREADS // 32),
            math.ceil((3 * parts.hidden + parts.targets) / warps),
            math.ceil(parts.targets / rows / warps),
        )


class _Launches:
    """The kernels of a translation, and their own memory."""

    def __init__(self, parts: Sentences, config: Attrs, frame: Frame) -> None:
        self.constants = rows_of(parts.step, frame)
        self._parts, self._frame = parts, frame
        self._kernels = {name: Kernel(frame.built, name) for name in ("run", "read_word", *KERNELS)}
        self._grids = _Grids.of(parts, config["rows"])
        self._rooms = _rooms(parts, frame.device)

    def run(self, stream: int) -> None:
        arguments, grids = self._arguments(), self._grids
        most = int(self._parts.attrs["max_steps"])

        def launch(name: str, blocks: int, threads: int, *more: object) -> None:
            self._kernels[name].launch(stream, (blocks, 1, 1), threads, [arguments, *more])

        launch("begin", grids.units, ROW_THREADS)
        for at in range(self._parts.length):
            launch("read_word", grids.units, UNIT_THREADS, ctypes.c_int(at))
        launch("add_context", grids.constants, ROW_THREADS)
        if can_loop() and driver.capture_of(stream) is not None:
            add_loop(stream, self._turn(arguments))
        else:
            for _ in range(most):
                launch("advance", grids.units, UNIT_THREADS)
                self._choose(arguments, stream)
        launch("finish", grids.units, ROW_THREADS)

    def _turn(self, arguments: Arguments) -> Callable[[Loop], None]:
        """Fills a turn of the loop in a graph."""
        grids, shared_bytes = self._grids, 8 * self._parts.samples

        def fill(loop: Loop) -> None:
            advance, choose = self._kernels["advance"], self._kernels["run"]
            given = [arguments, ctypes.c_ulonglong(loop.handle)]
            rows = (grids.rows, 1, 1)
            for _ in range(TURN):
                advance.add_to(loop, (grids.units, 1, 1), UNIT_THREADS, [arguments])
                choose.add_to(loop, rows, ROW_THREADS, given, shared_bytes=shared_bytes)

        return fill

    def _choose(self, arguments: Arguments, stream: int) -> None:
        given = [arguments, ctypes.c_ulonglong(0)]
        rows, shared_bytes = (self._grids.rows, 1, 1), 8 * self._parts.samples
        self._kernels["run"].launch(stream, rows, ROW_THREADS, given, shared_bytes=shared_bytes)

    def _arguments(self) -> Arguments:
        rooms = {name: tensor.data_ptr() for name, tensor in self._rooms.items()}
        return Arguments(**shared_arguments(self._parts, self.constants, self._frame), **rooms)


def _rooms(parts: Sentences, device: torch.device) -> dict[str, Tensor]:
    samples, width = parts.samples, 3 * parts.hidden + parts.targets

    def words(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=device)

    return {
        "hidden": torch.empty(2, samples, parts.hidden, device=device),
        "constant": torch.empty(samples, width, device=device),
        "best": words(samples),
        "word": words(samples),
        "made": words(samples, int(parts.attrs["max_steps"])),
        "counts": words(samples),
        "state": words(STATE_BYTES // 8),
    }


FAMILY = GruTranslateSteps()
