"""Greedy translation by GRUs as one operator of torch: `plantune::gru_translate`.

It is one operator so that a trace sees one node of it, whose loop ends by the words that it makes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SCHEMA = (
    "gru_translate(Tensor source, Tensor? lengths, Tensor[] weights, int begin, int end, "
    "int max_steps) -> (Tensor, Tensor)"
)
# The order of the weights.
GRU = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
WEIGHTS = (
    "source_embedding",
    *(f"encoder_{name}" for name in GRU),
    "embedding",
    *(f"decoder_{name}" for name in GRU),
    "output_weight",
    "output_bias",
)


def translate(
    source: Tensor,
    lengths: Tensor | None,
    weights: Sequence[Tensor],
    begin: int,
    end: int,
    max_steps: int,
) -> tuple[Tensor, Tensor]:
    """Words (N, max_steps) after `begin`, which are `end` from the end on, and how many there are
    until the end, with it.

    Of equal logits the first is taken, and NaN is the largest, as torch's argmax has it. On a CPU
    the loop stops when all sentences have ended; on a GPU that would cost more than it saves.
    """
    embedding, decoder, output = weights[5], weights[6:10], weights[10:]
    context = hidden = encode(source, lengths, weights)
    samples = source.shape[1]
    words = source.new_full((samples,), begin)
    made = source.new_full((samples, max_steps), end)
    steps = source.new_zeros(samples)
    ended = torch.zeros(samples, dtype=torch.bool, device=source.device)
    for step in range(max_steps):
        x = embedding[words]
        hidden = torch.gru_cell(torch.cat((x, context), 1), hidden, *decoder)
        logits = torch.nn.functional.linear(torch.cat((x, hidden, context), 1), *output)
        words = torch.where(ended, end, logits.argmax(1))
        made[:, step] = words
        steps += ~ended
        ended = ended | (words == end)
        if not source.is_cuda and ended.all():
            break
    return made, steps


def encode(source: Tensor, lengths: Tensor | None, weights: Sequence[Tensor]) -> Tensor:
    """The hidden state after each sentence's last word."""
    embedding, encoder = weights[0], weights[1:5]
    hidden = embedding.new_zeros(source.shape[1], encoder[1].shape[1])
    for step, words in enumerate(source):
        moved = torch.gru_cell(embedding[words], hidden, *encoder)
        hidden = moved if lengths is None else torch.where((lengths > step)[:, None], moved, hidden)
    return hidden


def _shapes(
    source: Tensor,
    lengths: Tensor | None,
    weights: Sequence[Tensor],
    begin: int,
    end: int,
    max_steps: int,
) -> tuple[Tensor, Tensor]:
    samples = source.shape[1]
    return source.new_empty((samples, max_steps)), source.new_empty((samples,))


_library = torch.library.Library("plantune", "FRAGMENT")
_library.define(SCHEMA)
for _place in ("CPU", "CUDA"):
    _library.impl("gru_translate", translate, _place)
_library.impl("gru_translate", _shapes, "Meta")
OPERATOR = torch.ops.plantune.gru_translate.default
