"""Translation in one launch: `csrc/cuda/gru_translator/translate.h`."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from plantune.cuda.kernel import Kernel
from plantune.graph.ops import op_named
from plantune.kernels.constants import Constants, rows_of
from plantune.kernels.cuda_family import Arch, Attrs, CudaFamily, Step, first_reason, refuse
from plantune.kernels.family import Binding, Frame
from plantune.kernels.gru_encoder import Encoder
from plantune.kernels.translation import Gru, Sentences, reasons, sentences_of
from plantune.models.gru_translate import WEIGHTS

# As in translate.h: hidden units of a block, one warp each.
THREADS, UNITS = 512, 4
OUTPUT_WARPS = THREADS // 32 - UNITS
ROWS_PER_WARP_MAX = 4
KERNELS = {"simt": ("translate", "Translate"), "tf32": ("many", "TranslateMany")}
SOURCE = """#include "cuda/gru_translator/{header}.h"
struct Sizes {{
  static constexpr int kEmbedding = {embedding}, kHidden = {hidden};
  static constexpr int kTargets = {targets}, kSamples = {samples};
}};
using Kernel = plantune::{kernel}<Sizes>;
static_assert(sizeof(plantune::TranslateArguments) == {argument_bytes}, "arguments as in Python");
static_assert(Kernel::kSharedBytes == {shared_bytes}, "shared memory as the launch asks for it");
extern "C" __global__ __launch_bounds__({threads}, 1) void run(
    plantune::TranslateArguments arguments) {{
  Kernel::run(arguments);
}}
"""


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
        ("states", ctypes.c_void_p),
        ("hidden_words", ctypes.c_void_p),
        ("best_words", ctypes.c_void_p),
        ("launches", ctypes.c_void_p),
        ("words", ctypes.c_void_p),
        ("steps", ctypes.c_void_p),
        ("source_length", ctypes.c_int),
        ("read", ctypes.c_int),
        ("max_steps", ctypes.c_int),
        ("samples", ctypes.c_int),
        ("begin", ctypes.c_longlong),
        ("end", ctypes.c_longlong),
    )


class GruTranslate(CudaFamily[Sentences]):
    """Config: a launch takes so many `samples`, which are sentences. It has a block for every four
    hidden units. With two `launches` the encoder has one of its own, of all sentences. `math` says
    how products are made: one by one, or by three of tf32 each.
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
                    "products of matrices take 16 sentences, already read": config["math"] == "tf32"
                    and (together % 16 or config["launches"] == 1),
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
        of_sample = cost["mma_sample_us" if config["math"] == "tf32" else "step_sample_us"]
        work = steps * (cost["step_us"] + others * of_sample)
        read = parts.length * (cost["read_us"] + others * cost["read_sample_us"])
        before = 0.0
        if config["launches"] > 1:
            waves = len(encoder_of(parts).launches(arch))
            before = cost["encoder_us"] + parts.length * waves * cost["scan_us"]
            read = 0.0
        one = cost["launch_us"] + (work + read) * self.slowdown(parts, arch)
        return before + one * parts.samples / int(config["samples"])

    def source(self, parts: Sentences, config: Attrs, arch: Arch) -> str:
        header, kernel = KERNELS[config["math"]]
        return SOURCE.format(
            header=header,
            kernel=kernel,
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
        if kernel.blocks_at_once(THREADS, shared_bytes) < _blocks(parts):
            return Binding(_by_torch(parts, frame))
        exchange, grid = Exchange(parts, together, frame.device), (_blocks(parts), 1, 1)

        def launch(stream: int) -> None:
            states = None if encode is None else encode(stream)
            for first in range(0, parts.samples, together):
                arguments = exchange.arguments(parts, constants, frame, first, states)
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
        found = [constants.tensor(name).data_ptr() for name in parts.weights]
        at = dict(zip(WEIGHTS, found, strict=True))
        made, steps = (frame.values[name] for name in parts.step.nodes[0].outputs)
        source, *lengths = (frame.values[name] for name in parts.words)
        noise = [constants.tensor(name)[:, first:] for name in parts.noise]
        return Arguments(
            source=source[0, first:].data_ptr() if states is None else None,
            states=None if states is None else states[0, first].data_ptr(),
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
            source_length=parts.length if states is None else 0,
            read=parts.length,
            samples=parts.samples,
            **{name: parts.attrs[name] for name in ("max_steps", "begin", "end")},
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
    """plantune::Translate::Shared, plantune::TranslateMany::Shared."""
    together, hidden, embedding = int(config["samples"]), parts.hidden, parts.embedding
    rows = OUTPUT_WARPS * _rows_per_warp(parts)
    words = together * (2 * OUTPUT_WARPS + 1)
    if config["math"] == "simt":
        words += together * (2 * hidden + embedding) + rows * embedding
    else:
        tiles = OUTPUT_WARPS // 4 + 1
        words += together * (hidden + 8) + (together + 16 * tiles) * (embedding + 8)
        words += (OUTPUT_WARPS + 8) * 16 * (together + 1)
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
