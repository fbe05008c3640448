"""Steps that translate by GRUs, as the families of their kernels read them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from plantune.canonical import Attrs
from plantune.graph.ops.translate import split
from plantune.graph.step import Step
from plantune.kernels.family import Parts
from plantune.kernels.legality import refuse

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

    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("input", "hidden", "input_bias", "hidden_bias")
    )


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
