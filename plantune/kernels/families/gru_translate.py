"""Translation in one launch: `csrc/cuda/gru_translator/translate.h`."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from plantune.cuda.kernel import Kernel
from plantune.graph.ops import op_named
from plantune.graph.ops.translate import split
from plantune.kernels.constants import Constants, rows_of
from plantune.kernels.cuda_family import Arch, Attrs, CudaFamily, Step, first_reason, refuse
from plantune.kernels.family import Binding, Frame, Parts
from plantune.models.gru_translate import WEIGHTS

# As in translate.h: hidden units of a block, one warp each, and what a warp reads at once.
THREADS, UNITS, LANE_SPAN = 512, 4, 128
OUTPUT_WARPS = THREADS // 32 - UNITS
ROWS_PER_WARP_MAX = 4
SOURCE = """#include "cuda/gru_translator/translate.h"
struct Sizes {{
  static constexpr int kEmbedding = {embedding}, kHidden = {hidden};
  static constexpr int kTargets = {targets}, kSamples = {samples};
}};
using Kernel = plantune::Translate<Sizes>;
static_assert(sizeof(plantune::TranslateArguments) == {argument_bytes}, "arguments as in Python");
static_assert(Kernel::kSharedBytes == {shared_bytes}, "shared memory as the launch asks for it");
extern "C" __global__ __launch_bounds__({threads}, 1) void run(
    plantune::TranslateArguments arguments) {{
  Kernel::run(arguments);
}}
"""


@dataclass(frozen=True)
class Sentences(Parts):
    """A step that translates: its words, weights and sizes."""

    words: tuple[str, ...]
    weights: tuple[str, ...]
    noise: tuple[str, ...]
    attrs: Attrs
    length: int
    samples: int
    embedding: int
    hidden: int
    targets: int

    @property
    def blocks(self) -> int:
        return self.hidden // UNITS

    @property
    def rows_per_warp(self) -> int:
        """Rows of the output layer."""
        return math.ceil(math.ceil(self.targets / self.blocks) / OUTPUT_WARPS)


class Gru(ctypes.Structure):
    """plantune::GruWeights."""

    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("input", "hidden", "input_bias", "hidden_bias")
    )


class Arguments(ctypes.Structure):
    """plantune::TranslateArguments."""

    _fields_ = (
        ("source", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("source_embedding", ctypes.c_void_p),
        ("encoder", Gru),
        ("embedding", ctypes.c_void_p),
        ("decoder", Gru),
        ("output", ctypes.c_void_p),
        ("output_bias", ctypes.c_void_p),
        ("noise", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("hidden_words", ctypes.c_void_p),
        ("best_words", ctypes.c_void_p),
        ("launches", ctypes.c_void_p),
        ("words", ctypes.c_void_p),
        ("steps", ctypes.c_void_p),
        ("source_length", ctypes.c_int),
        ("max_steps", ctypes.c_int),
        ("samples", ctypes.c_int),
        ("begin", ctypes.c_longlong),
        ("end", ctypes.c_longlong),
    )


class GruTranslate(CudaFamily[Sentences]):
    """Config: a launch takes so many `samples`, which are sentences. It has a block for every four
    hidden units.
    """

    name: ClassVar = "gru_translate"

    def read(self, step: Step) -> Sentences:
        refuse({"only a translation alone": step.ops != ("gru_translate",)})
        (node,) = step.nodes
        words, weights, noise = split(node.inputs, node.attrs)
        source, output, recurrent = (step.types[n] for n in (words[0], weights[10], weights[2]))
        hidden = recurrent.shape[1]
        sizes = (output.shape[1] - 2 * hidden, hidden, output.shape[0])
        length, samples = source.shape
        names = (tuple(words), tuple(weights), tuple(noise))
        parts = Sentences(step, *names, node.attrs, length, samples, *sizes)
        refuse(_reasons(parts, output.dtype))
        return parts

    def why_not_config(self, parts: Sentences, config: Attrs, arch: Arch) -> str | None:
        room = arch.chip.multiprocessors if arch.chip else parts.blocks
        too_many = f"{parts.blocks} blocks must run at once on {room} multiprocessors"
        together = config["samples"]
        return super().why_not_config(parts, config, arch) or first_reason(
            {
                too_many: parts.blocks > room,
                f"{together} at a time do not make {parts.samples}": parts.samples % together,
            }
        )

    def threads(self, parts: Sentences, config: Attrs) -> int:
        return THREADS

    def shared_bytes(self, parts: Sentences, config: Attrs, arch: Arch) -> int:
        return _shared_bytes(parts, config["samples"])

    def estimate_us(self, parts: Sentences, config: Attrs, arch: Arch) -> float:
        """If no sentence ends before the last step."""
        cost, steps = arch.cost(self.name), int(parts.attrs["max_steps"])
        more = (int(config["samples"]) - 1) * cost["sample_us"]
        work = parts.length * (cost["read_us"] + more) + steps * (cost["step_us"] + more)
        one = cost["launch_us"] + work * self.slowdown(parts, arch)
        return one * parts.samples / int(config["samples"])

    def source(self, parts: Sentences, config: Attrs, arch: Arch) -> str:
        return SOURCE.format(
            embedding=parts.embedding,
            hidden=parts.hidden,
            targets=parts.targets,
            samples=config["samples"],
            argument_bytes=ctypes.sizeof(Arguments),
            shared_bytes=_shared_bytes(parts, config["samples"]),
            threads=THREADS,
        )

    def bind(self, parts: Sentences, config: Attrs, frame: Frame) -> Binding:
        constants = rows_of(parts.step, frame)
        kernel = Kernel(frame.built, cooperative=True)
        together = int(config["samples"])
        shared_bytes = _shared_bytes(parts, together)
        if kernel.blocks_at_once(THREADS, shared_bytes) < parts.blocks:
            return Binding(_by_torch(parts, frame))
        exchange, grid = Exchange(parts, together, frame.device), (parts.blocks, 1, 1)

        def launch(stream: int) -> None:
            for first in range(0, parts.samples, together):
                arguments = exchange.arguments(parts, constants, frame, first)
                kernel.launch(stream, grid, THREADS, [arguments], shared_bytes=shared_bytes)

        return Binding(launch, constants=constants.all)


class Exchange:
    """What the blocks of a launch tell each other. It outlives a launch: tags tell launches apart,
    and begin with zeros.
    """

    def __init__(self, parts: Sentences, together: int, device: torch.device) -> None:
        steps = int(parts.attrs["max_steps"])

        def words(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.hidden_words = words(parts.length + steps, together, parts.hidden)
        self.best_words = words(steps, together, parts.blocks)
        self.launches = words(1)
        self.context = torch.zeros(together, parts.hidden, device=device)

    def arguments(
        self, parts: Sentences, constants: Constants, frame: Frame, first: int
    ) -> Arguments:
        """Those of a launch for the sentences from `first` on."""
        found = [constants.tensor(name).data_ptr() for name in parts.weights]
        at = dict(zip(WEIGHTS, found, strict=True))
        made, steps = (frame.values[name] for name in parts.step.nodes[0].outputs)
        source, *lengths = (frame.values[name] for name in parts.words)
        noise = [constants.tensor(name)[:, first:] for name in parts.noise]
        return Arguments(
            source=source[0, first:].data_ptr(),
            lengths=lengths[0][first:].data_ptr() if lengths else None,
            source_embedding=at["source_embedding"],
            encoder=Gru(*found[1:5]),
            embedding=at["embedding"],
            decoder=Gru(*found[6:10]),
            output=at["output_weight"],
            output_bias=at["output_bias"],
            noise=noise[0].data_ptr() if noise else None,
            **{name: tensor.data_ptr() for name, tensor in vars(self).items()},
            words=made[first].data_ptr(),
            steps=steps[first:].data_ptr(),
            source_length=parts.length,
            samples=parts.samples,
            **{name: parts.attrs[name] for name in ("max_steps", "begin", "end")},
        )


def _reasons(parts: Sentences, dtype: str) -> dict[str, object]:
    targets = {parts.attrs["begin"], parts.attrs["end"]}
    return {
        f"the kernel computes in float32, got {dtype}": dtype != "float32",
        f"an embedding has whole vectors of {LANE_SPAN}": parts.embedding % LANE_SPAN,
        f"hidden units fill blocks by {64 * UNITS}": parts.hidden % (64 * UNITS),
        f"{parts.targets} words need more registers": parts.rows_per_warp > ROWS_PER_WARP_MAX,
        "it begins or ends with a word that there is not": not all(
            0 <= word < parts.targets for word in targets
        ),
        "there is no step to make": parts.attrs["max_steps"] < 1,
    }


def _shared_bytes(parts: Sentences, together: int) -> int:
    """plantune::Translate::Shared."""
    rows = OUTPUT_WARPS * parts.rows_per_warp * parts.embedding
    of_sample = 2 * parts.hidden + parts.embedding + 2 * OUTPUT_WARPS + 1
    words = together * of_sample + rows
    return math.ceil(4 * words / 8) * 8 + 8


def _by_torch(parts: Sentences, frame: Frame) -> Callable[[int], None]:
    """Where not all blocks fit beside each other, as on a part of a GPU."""
    node, values = parts.step.nodes[0], frame.values

    def launch(stream: int) -> None:
        made: Sequence[Tensor] = op_named(node.op).evaluate(
            [values[name] for name in node.inputs], node.attrs
        )
        for name, tensor in zip(node.outputs, made, strict=True):
            values[name].copy_(tensor)

    return launch


FAMILY = GruTranslate()
