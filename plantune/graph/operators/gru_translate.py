"""Translation by GRUs as one operator of torch: `plantune::gru_translate`, and with the likeliest
words of each step `plantune::gru_translate_top`.

It is one operator so that a trace sees one node of it, whose loop ends by the words that it makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

TAKEN = (
    "(Tensor source, Tensor? lengths, Tensor[] weights, Tensor? noise, int begin, int end, "
    "int max_steps"
)
SCHEMAS = (
    f"gru_translate{TAKEN}) -> (Tensor, Tensor)",
    f"gru_translate_top{TAKEN}, int top) -> (Tensor, Tensor, Tensor, Tensor)",
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
    noise: Tensor | None,
    *loop: int,
) -> tuple[Tensor, Tensor]:
    """Words (N, max_steps) after `begin`, which are `end` from the end on, and how many there are
    until the end, with it. They are the largest of the logits with what the noise (max_steps, N,
    words) adds.

    Of equal ones the first is taken, and NaN is the largest, as torch's argmax has it. On a CPU the
    loop stops when all sentences have ended; on a GPU that would cost more than it saves.

    `loop` are begin, end and max_steps.
    """
    return translate_top(source, lengths, weights, noise, *loop, 0)[:2]


def translate_top(
    source: Tensor,
    lengths: Tensor | None,
    weights: Sequence[Tensor],
    noise: Tensor | None,
    *loop: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As translate, and the `top` likeliest words of each step (N, max_steps, top) with their
    log-probabilities: without the noise. After the end they are `end`, and 0.

    `loop` are begin, end, max_steps and top.
    """
    begin, end, max_steps, top = loop
    embedding, decoder, output = weights[5], weights[6:10], weights[10:]
    context = hidden = encode(source, lengths, weights)
    samples = source.shape[1]
    words = source.new_full((samples,), begin)
    made = source.new_full((samples, max_steps), end)
    steps = source.new_zeros(samples)
    likely = source.new_full((samples, max_steps, top), end)
    scores = embedding.new_zeros((samples, max_steps, top))
    ended = torch.zeros(samples, dtype=torch.bool, device=source.device)
    for step in range(max_steps):
        x = embedding[words]
        hidden = torch.gru_cell(torch.cat((x, context), 1), hidden, *decoder)
        logits = torch.nn.functional.linear(torch.cat((x, hidden, context), 1), *output)
        if top:
            best = logits.log_softmax(1).topk(top)
            likely[:, step] = torch.where(ended[:, None], end, best.indices)
            scores[:, step] = torch.where(ended[:, None], 0.0, best.values)
        chosen = logits if noise is None else logits + noise[step]
        words = torch.where(ended, end, chosen.argmax(1))
        made[:, step] = words
        steps += ~ended
        ended = ended | (words == end)
        if not source.is_cuda and ended.all():
            break
    return made, steps, likely, scores


def encode(source: Tensor, lengths: Tensor | None, weights: Sequence[Tensor]) -> Tensor:
    """The hidden state after each sentence's last word."""
    embedding, encoder = weights[0], weights[1:5]
    hidden = embedding.new_zeros(source.shape[1], encoder[1].shape[1])
    for step, words in enumerate(source):
        moved = torch.gru_cell(embedding[words], hidden, *encoder)
        hidden = moved if lengths is None else torch.where((lengths > step)[:, None], moved, hidden)
    return hidden


def _shapes(source: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    samples = source.shape[1]
    return source.new_empty((samples, others[-1])), source.new_empty((samples,))


def _shapes_top(source: Tensor, *others: Any) -> tuple[Tensor, ...]:
    words, steps = _shapes(source, *others[:-1])
    likely = source.new_empty((*words.shape, others[-1]))
    return words, steps, likely, likely.to(others[1][0].dtype)


_library = torch.library.Library("plantune", "FRAGMENT")
for _schema, _run, _meta in zip(
    SCHEMAS, (translate, translate_top), (_shapes, _shapes_top), strict=True
):
    _name = _schema.partition("(")[0]
    _library.define(_schema)
    for _place in ("CPU", "CUDA"):
        _library.impl(_name, _run, _place)
    _library.impl(_name, _meta, "Meta")
OPERATOR = torch.ops.plantune.gru_translate.default
TOP_OPERATOR = torch.ops.plantune.gru_translate_top.default
