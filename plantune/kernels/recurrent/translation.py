"""Steps that translate by GRUs, as the families of their kernels read them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from plantune.base.canonical import Attrs
from plantune.devices.cuda.structs import fields
from plantune.graph.operators.gru_translate import WEIGHTS
from plantune.graph.ops.translate import split
from plantune.graph.step import Step
from plantune.kernels.family import Frame, Parts
from plantune.kernels.legality import refuse
from plantune.kernels.weights.constants import Constants

LANE_SPAN = 128  # floats that a warp reads at once: lanes.h


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


class Gru(ctypes.Structure):
    """plantune::GruWeights."""

    _fields_ = fields("input hidden input_bias hidden_bias")


class SharedArguments(ctypes.Structure):
    """plantune::SharedArguments: what every kernel of a translation is told."""

    _fields_ = fields(
        "source lengths source_embedding encoder:gru embedding decoder:gru output output_bias "
        "noise words steps begin:longlong end:longlong "
        "source_length:int read:int max_steps:int samples:int",
        gru=Gru,
    )


def shared_arguments(
    parts: Sentences, constants: Constants, frame: Frame, first: int = 0
) -> dict[str, Any]:
    """The fields of SharedArguments, for the sentences from `first` on."""
    found = [constants.tensor(name).data_ptr() for name in parts.weights]
    at = dict(zip(WEIGHTS, found, strict=True))
    source, *lengths = (frame.values[name] for name in parts.words)
    noise = [constants.tensor(name)[:, first:] for name in parts.noise]
    words, steps = (frame.values[name] for name in parts.step.nodes[0].outputs)
    return {
        "source": source[0, first:].data_ptr(),
        "lengths": lengths[0][first:].data_ptr() if lengths else None,
        "source_embedding": at["source_embedding"],
        "encoder": Gru(*found[1:5]),
        "embedding": at["embedding"],
        "decoder": Gru(*found[6:10]),
        "output": at["output_weight"],
        "output_bias": at["output_bias"],
        "noise": noise[0].data_ptr() if noise else None,
        "words": words[first].data_ptr(),
        "steps": steps[first:].data_ptr(),
        "source_length": parts.length,
        "read": parts.length,
        "samples": parts.samples,
        **{name: parts.attrs[name] for name in ("max_steps", "begin", "end")},
    }


def sentences_of(step: Step) -> Sentences:
    refuse({"only a translation alone": step.ops != ("gru_translate",)})
    (node,) = step.nodes
    words, weights, noise = split(node.inputs, node.attrs)
    source, output, recurrent = (step.types[n] for n in (words[0], weights[10], weights[2]))
    hidden = recurrent.shape[1]
    sizes = (output.shape[1] - 2 * hidden, hidden, output.shape[0])
    length, samples = source.shape
    names = (tuple(words), tuple(weights), tuple(noise))
    return Sentences(step, *names, node.attrs, length, samples, *sizes)


def reasons(parts: Sentences) -> dict[str, object]:
    """Why no kernel runs it, each with whether it holds."""
    dtype = parts.step.types[parts.weights[0]].dtype
    targets = {parts.attrs["begin"], parts.attrs["end"]}
    return {
        f"the kernel computes in float32, got {dtype}": dtype != "float32",
        f"an embedding has whole vectors of {LANE_SPAN}": parts.embedding % LANE_SPAN,
        "it begins or ends with a word that there is not": not all(
            0 <= word < parts.targets for word in targets
        ),
        "there is no step to make": parts.attrs["max_steps"] < 1,
    }
