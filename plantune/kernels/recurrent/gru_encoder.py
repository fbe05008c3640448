"""A GRU encoder of words: one product of all inputs with the weights, and one launch for all steps.

For many sentences this is faster than to read them in the launch that translates.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from plantune.devices.cuda.kernel import Kernel
from plantune.graph.layouts import aligned
from plantune.graph.step import Step
from plantune.kernels.family import Frame
from plantune.kernels.recurrent.scan_division import THREADS, Division, Sequence
from plantune.kernels.recurrent.scan_launches import Launches, structure
from plantune.kernels.weights.constants import Constants
from plantune.space.arch import Arch

# The fastest for 32 steps of 64 samples and 512 units (H200, 2026-11-23).
UNITS, SAMPLES = 16, 16
OF_SCAN = ("gates", "state", "weight", "bias", "done", "words", "launches")
ARGUMENTS = structure(OF_SCAN, ("y",))
EMBED_THREADS = 64
SOURCE = """#include "cuda/gru_scan.h"
#include "cuda/gru_translator/embed.h"
struct EncoderSizes {{
  using T = float;
  static constexpr int kHidden = {hidden}, kUnits = {units}, kSamples = {samples};
}};
using Encoder = plantune::GruScan<EncoderSizes>;
static_assert(sizeof(Encoder::Arguments) == {argument_bytes}, "arguments as in Python");
static_assert(Encoder::kSharedBytes == {shared_bytes}, "shared memory as the launch asks for it");
extern "C" __global__ __launch_bounds__({threads}, 1) void encode(Encoder::Arguments arguments) {{
  Encoder::run(arguments);
}}
extern "C" __global__ void embed(const long long* words, const float* table, float* x) {{
  plantune::embed<{embedding}>(words, table, x);
}}
"""


@dataclass(frozen=True)
class Encoder:
    """Of words (S, N) by an embedding and a GRU, in float32; `names` are those of the words, the
    embedding, and the GRU's weights as torch has them.
    """

    step: Step
    names: tuple[str, ...]
    length: int
    samples: int
    hidden: int
    embedding: int

    @property
    def _divided(self) -> Division:
        sizes = (3, self.length, self.samples, self.hidden, "float32")
        return Division(Sequence(self.step, {}, *sizes), UNITS, SAMPLES, of_gradient=False)

    def why_not(self, arch: Arch) -> dict[str, object]:
        divided = self._divided
        alone = {"one word is read as fast beside the translation": self.length < 2}
        return {**alone, **divided.sequence.why_not(), **divided.why_not(arch)}

    def launches(self, arch: Arch) -> tuple[int, ...]:
        room = arch.chip.multiprocessors if arch.chip else self._divided.of_group
        return self._divided.launches(room)

    @property
    def source(self) -> str:
        return SOURCE.format(
            hidden=self.hidden,
            embedding=self.embedding,
            units=UNITS,
            samples=SAMPLES,
            argument_bytes=ctypes.sizeof(ARGUMENTS),
            shared_bytes=self._divided.shared_bytes,
            threads=THREADS,
        )

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the intermediate results."""
        rows = (self.length, self.samples)
        return {
            "x": (*rows, self.embedding),
            "gates": (*rows, 3 * self.hidden),
            "y": (*rows, self.hidden),
            "state": (self.samples, self.hidden),
        }

    @property
    def workspace_bytes(self) -> int:
        return sum(aligned(4 * torch.Size(shape).numel()) for shape in self._shapes.values())

    def _rooms(self, frame: Frame) -> dict[str, Tensor]:
        assert frame.workspace is not None
        made, start = {}, 0
        for name, shape in self._shapes.items():
            count = 4 * torch.Size(shape).numel()
            made[name] = frame.workspace[start : start + count].view(torch.float32).view(shape)
            start += aligned(count)
        return made

    def bound(self, frame: Frame, constants: Constants) -> Callable[[int], Tensor]:
        """Makes the states (S, N, H) after each word."""
        kernel = Kernel(frame.built, "encode", cooperative=self._divided.waits)
        launches = Launches(kernel, self._divided, ARGUMENTS, frame.device)
        embed = Kernel(frame.built, "embed")
        at = self._rooms(frame)
        source, embedding, of_x, of_state, bias, of_state_bias = self.names

        def encode(stream: int) -> Tensor:
            # A kernel of ours: what moves inputs in a captured graph knows no other reader of them.
            words = (frame.values[source], constants.tensor(embedding), at["x"])
            embed.launch(stream, (self.length * self.samples, 1, 1), EMBED_THREADS, words)
            weight = constants.tensor(of_x).t()
            inputs, gates = at["x"].flatten(0, 1), at["gates"].flatten(0, 1)
            torch.addmm(constants.tensor(bias), inputs, weight, out=gates)
            at["state"].zero_()
            given = {"weight": constants.tensor(of_state), "bias": constants.tensor(of_state_bias)}
            launches.run(stream, {**at, **given})
            return at["y"]

        return encode
