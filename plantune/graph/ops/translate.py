"""Translation by a GRU encoder and decoder: from words to words, with no gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

from plantune.base.canonical import Attrs
from plantune.graph.operators.gru_translate import WEIGHTS, translate
from plantune.graph.ops.base import Domain, Op, Tensors, Types
from plantune.graph.types import TensorType

T = TypeVar("T")


class GruTranslate(Op):
    """Inputs are the source's words (S, N), with `lengths` how many of each sentence count, and the
    weights, and with `noise` what it adds to the logits (max_steps, N, words); outputs are the
    words (N, max_steps) and how many there are until the end.
    """

    name = "gru_translate"
    arity = None
    multiplies = True

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        words, weights, noise = split(inputs, attrs)
        self.require(len(weights) == len(WEIGHTS), f"needs {len(WEIGHTS)} weights")
        source = words[0]
        fits = len(source.shape) == 2 and min(source.shape) > 0
        self.require(fits and source.dtype == "int64", f"needs words (S, N), got {source}")
        of_each = TensorType(source.shape[1:])
        same = all(t.shape == of_each.shape and t.dtype == "int64" for t in words[1:])
        self.require(same, f"lengths need shape {of_each.shape}")
        dtypes = {type_.dtype for type_ in weights}
        self.require(len(dtypes) == 1 and weights[0].is_float, "weights need one dtype of floats")
        wanted = _shapes(weights)
        for name, type_, shape in zip(WEIGHTS, weights, wanted, strict=True):
            self.require(type_.shape == shape, f"{name} has shape {type_.shape}, needs {shape}")
        samples = source.shape[1]
        steps = attrs["max_steps"]
        added = TensorType((steps, samples, weights[10].shape[0]), weights[0].dtype)
        self.require(list(noise) == [added] * attrs["noise"], f"noise needs {added}")
        return (TensorType((samples, steps), "int64"), TensorType((samples,), "int64"))

    def evaluate(self, inputs: Tensors, attrs: Attrs) -> Tensors:
        words, weights, noise = split(inputs, attrs)
        lengths: Tensor | None = words[1] if attrs["lengths"] else None
        loop = (attrs["begin"], attrs["end"], attrs["max_steps"])
        return translate(words[0], lengths, weights, noise[0] if noise else None, *loop)

    def differentiates(self, wanted: object, inputs: Types, attrs: Attrs) -> bool:
        return False

    def domain(self, position: int, inputs: Types, attrs: Attrs) -> Domain:
        words, weights, _ = split(inputs, attrs)
        if position >= len(words):
            return Domain()
        return Domain("index", (weights[0] if position == 0 else words[0]).shape[0])

    def flops(self, inputs: Types, outputs: Types, attrs: Attrs) -> int:
        """If no sentence ends before the last step."""
        words, weights, _ = split(inputs, attrs)
        read = sum(type_.numel for type_ in weights[1:5]) * words[0].shape[0]
        made = sum(type_.numel for type_ in weights[6:]) * attrs["max_steps"]
        return int(2 * words[0].shape[1] * (read + made))


def split(inputs: Sequence[T], attrs: Attrs) -> tuple[Sequence[T], Sequence[T], Sequence[T]]:
    """Words and lengths, the weights, and the noise if there is any."""
    words = 2 if attrs["lengths"] else 1
    weights = len(inputs) - bool(attrs["noise"])
    return inputs[:words], inputs[words:weights], inputs[weights:]


def _shapes(weights: Types) -> tuple[tuple[int, ...], ...]:
    """What the shapes of the weights must be, by those of the embeddings, state and output."""
    source_words, embedding = (*weights[0].shape, 0, 0)[:2]
    words = (*weights[10].shape, 0)[0]
    hidden = (*weights[2].shape, 0, 0)[1]

    def gru(width: int) -> tuple[tuple[int, ...], ...]:
        return ((3 * hidden, width), (3 * hidden, hidden), (3 * hidden,), (3 * hidden,))

    return (
        (source_words, embedding),
        *gru(embedding),
        (words, embedding),
        *gru(embedding + hidden),
        (words, embedding + 2 * hidden),
        (words,),
    )


OPS: tuple[Op, ...] = (GruTranslate(),)
