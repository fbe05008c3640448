"""Translation in one launch: `csrc/cuda/gru_translator/translate.h`."""

from __future__ import annotations

import ctypes
import math
from typing import ClassVar

import torch
from torch import Tensor

from plantune.devices.cuda.kernel import Kernel
from plantune.devices.cuda.structs import fields
from plantune.errors import BuildError
from plantune.kernels.cuda.cuda_family import Arch, Attrs, CudaFamily, Step, first_reason, refuse
from plantune.kernels.family import Binding, Frame
from plantune.kernels.recurrent.gru_encoder import Encoder
from plantune.kernels.recurrent.translation import (
    Sentences,
    SharedArguments,
    reasons,
    sentences_of,
    shared_arguments,
)
from plantune.kernels.weights.constants import Constants, rows_of

# As in translate.h: hidden units of a block, one warp each.
THREADS, UNITS = 512, 4
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


class Arguments(SharedArguments):
    """plantune::TranslateArguments."""

    _fields_ = fields("states hidden_words best_words launches")


class GruTranslate(CudaFamily[Sentences]):
    """Config: a launch takes so many `samples`, which are sentences. It has a block for every four
    hidden units. With two `launches` the encoder has one of its own, of all sentences.
    """

    name: ClassVar = "gru_translate"

    def read(self, step: Step) -> Sentences:
        parts = sentences_of(step)
        refuse({**reasons(parts), **_reasons(parts)})
        return parts

    def why_not_config(self, parts: Sentences, config: Attrs, arch: Arch) -> str | None:
        room = arch.chip.multiprocessors if arch.chip else _blocks(parts)
        too_many = f"{_blocks(parts)} blocks must run at once on {room} multiprocessors"
        together = config["samples"]
        return (
            super().why_not_config(parts, config, arch)
            or first_reason(
                {
                    too_many: _blocks(parts) > room,
                    f"{together} at a time do not make {parts.samples}": parts.samples % together,
                }
            )
            or self._why_not_encoder(parts, config, arch)
        )

    def _why_not_encoder(self, parts: Sentences, config: Attrs, arch: Arch) -> str | None:
        return first_reason(encoder_of(parts).why_not(arch)) if config["launches"] > 1 else None

    def workspace_bytes(self, parts: Sentences, config: Attrs) -> int:
        return encoder_of(parts).workspace_bytes if config["launches"] > 1 else 0

    def threads(self, parts: Sentences, config: Attrs) -> int:
        return THREADS

    def shared_bytes(self, parts: Sentences, config: Attrs, arch: Arch) -> int:
        return _shared_bytes(parts, config)

    def estimate_us(self, parts: Sentences, config: Attrs, arch: Arch) -> float:
        """If no sentence ends before the last step."""
        cost, steps = arch.cost(self.name), int(parts.attrs["max_steps"])
        others = int(config["samples"]) - 1
        work = steps * (cost["step_us"] + others * cost["step_sample_us"])
        read = parts.length * (cost["read_us"] + others * cost["read_sample_us"])
        before = 0.0
        if config["launches"] > 1:
            waves = len(encoder_of(parts).launches(arch))
            before = cost["encoder_us"] + parts.length * waves * cost["scan_us"]
            read = 0.0
        one = cost["launch_us"] + (work + read) * self.slowdown(parts, arch)
        return before + one * parts.samples / int(config["samples"])

    def source(self, parts: Sentences, config: Attrs, arch: Arch) -> str:
        return SOURCE.format(
            embedding=parts.embedding,
            hidden=parts.hidden,
            targets=parts.targets,
            samples=config["samples"],
            argument_bytes=ctypes.sizeof(Arguments),
            shared_bytes=_shared_bytes(parts, config),
            threads=THREADS,
        ) + (encoder_of(parts).source if config["launches"] > 1 else "")

    def bind(self, parts: Sentences, config: Attrs, frame: Frame) -> Binding:
        constants = rows_of(parts.step, frame)
        kernel = Kernel(frame.built, cooperative=True)
        together = int(config["samples"])
        shared_bytes = _shared_bytes(parts, config)
        encode = encoder_of(parts).bound(frame, constants) if config["launches"] > 1 else None
        room = kernel.blocks_at_once(THREADS, shared_bytes)
        if room < _blocks(parts):
            raise BuildError(f"{_blocks(parts)} blocks must run at once, {room} can")
        messages, grid = Messages(parts, together, frame.device), (_blocks(parts), 1, 1)

        def launch(stream: int) -> None:
            states = None if encode is None else encode(stream)
            for first in range(0, parts.samples, together):
                arguments = messages.arguments(parts, constants, frame, first, states)
                kernel.launch(stream, grid, THREADS, [arguments], shared_bytes=shared_bytes)

        return Binding(launch, constants=constants.all)


class Messages:
    """What the blocks of a launch tell each other. It outlives a launch: tags tell launches apart,
    and begin with zeros.
    """

    def __init__(self, parts: Sentences, together: int, device: torch.device) -> None:
        steps = int(parts.attrs["max_steps"])

        def words(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.hidden_words = words(parts.length + steps, together, parts.hidden)
        self.best_words = words(steps, together, _blocks(parts))
        self.launches = words(1)

    def arguments(
        self,
        parts: Sentences,
        constants: Constants,
        frame: Frame,
        first: int,
        states: Tensor | None,
    ) -> Arguments:
        """Those of a launch for the sentences from `first` on, whose source has been read if there
        are `states` (S, N, H).
        """
        shared = shared_arguments(parts, constants, frame, first)
        if states is not None:
            shared |= {"source": None, "source_length": 0}
        return Arguments(
            states=None if states is None else states[0, first].data_ptr(),
            **shared,
            **{name: tensor.data_ptr() for name, tensor in vars(self).items()},
        )


def encoder_of(parts: Sentences) -> Encoder:
    names = (parts.words[0], *parts.weights[:5])
    return Encoder(parts.step, names, parts.length, parts.samples, parts.hidden, parts.embedding)


def _blocks(parts: Sentences) -> int:
    return parts.hidden // UNITS


def _rows_per_warp(parts: Sentences) -> int:
    """Rows of the output layer."""
    return math.ceil(math.ceil(parts.targets / _blocks(parts)) / OUTPUT_WARPS)


def _reasons(parts: Sentences) -> dict[str, object]:
    whole = not parts.hidden % (64 * UNITS)
    return {
        f"hidden units fill blocks by {64 * UNITS}": not whole,
        f"{parts.targets} words need more registers": whole
        and _rows_per_warp(parts) > ROWS_PER_WARP_MAX,
    }


def _shared_bytes(parts: Sentences, config: Attrs) -> int:
    """plantune::Translate::Shared."""
    together, embedding = int(config["samples"]), parts.embedding
    words = together * (2 * parts.hidden + embedding + 2 * OUTPUT_WARPS + 1)
    words += OUTPUT_WARPS * _rows_per_warp(parts) * embedding
    return math.ceil(4 * words / 8) * 8 + 8


FAMILY = GruTranslate()
