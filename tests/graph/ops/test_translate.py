"""Greedy translation by its formula, word by word."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from plantune.base.canonical import Attrs
from plantune.graph.ops import OPS
from plantune.graph.types import TensorType, dtype_name

OP = OPS["gru_translate"]
BEGIN, END, STEPS = 2, 1, 9


def gru(x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor) -> Tensor:
    reset_x, update_x, new_x = (w_ih @ x + b_ih).chunk(3)
    reset_h, update_h, new_h = (w_hh @ h + b_hh).chunk(3)
    reset, update = torch.sigmoid(reset_x + reset_h), torch.sigmoid(update_x + update_h)
    return (1 - update) * torch.tanh(new_x + reset * new_h) + update * h


def translated(words: list[int], weights: list[Tensor]) -> list[int]:
    """One sentence."""
    h = weights[2].new_zeros(weights[2].shape[1])
    for word in words:
        h = gru(weights[0][word], h, *weights[1:5])
    context, made = h, [BEGIN]
    while len(made) <= STEPS and made[-1] != END:
        x = weights[5][made[-1]]
        h = gru(torch.cat((x, context)), h, *weights[6:10])
        logits = weights[10] @ torch.cat((x, h, context)) + weights[11]
        made.append(int(logits.tolist().index(logits.max())))
    return made[1:]


def weights_of(embedding: int, hidden: int, words: int) -> list[Tensor]:
    def gru_of(width: int) -> tuple[tuple[int, ...], ...]:
        return (3 * hidden, width), (3 * hidden, hidden), (3 * hidden,), (3 * hidden,)

    last = (words, embedding + 2 * hidden)
    encoder, decoder = gru_of(embedding), gru_of(embedding + hidden)
    shapes = ((13, embedding), *encoder, (words, embedding), *decoder, last, (words,))
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("with_lengths", [False, True])
def test_each_sentence_is_translated_by_itself(with_lengths: bool) -> None:
    weights = weights_of(4, 5, 6)
    weights[11][END] += 2
    source, lengths = torch.randint(13, (7, 40)), torch.randint(1, 8, (40,))
    words = [source, lengths] if with_lengths else [source]
    attrs = Attrs(begin=BEGIN, end=END, max_steps=STEPS, lengths=with_lengths, noise=False)

    made, steps = OP.evaluate([*words, *weights], attrs)

    read = lengths.tolist() if with_lengths else [7] * 40
    wanted = [translated(source[:n, i].tolist(), weights) for i, n in enumerate(read)]
    assert [row[:n] for row, n in zip(made.tolist(), steps.tolist(), strict=True)] == wanted
    rests = [row[n:] for row, n in zip(made.tolist(), steps.tolist(), strict=True)]
    assert rests == [[END] * (STEPS - len(sentence)) for sentence in wanted]
    assert len({len(sentence) for sentence in wanted}) > 1  # some end early, some never
    types = [TensorType(tuple(t.shape), dtype_name(t.dtype)) for t in (*words, *weights)]
    assert [(t.shape, t.torch_dtype) for t in OP.infer(types, attrs)] == [
        (tuple(t.shape), t.dtype) for t in (made, steps)
    ]


def test_of_equal_logits_the_first_word_is_taken() -> None:
    weights = weights_of(4, 5, 6)
    weights[10].zero_()
    weights[11] = torch.tensor([0.0, 0.5, 2.0, 1.0, 2.0, 2.0], dtype=torch.float64)
    attrs = Attrs(begin=BEGIN, end=END, max_steps=STEPS, lengths=False, noise=False)
    made, steps = OP.evaluate([torch.randint(13, (3, 2)), *weights], attrs)
    assert made.eq(2).all()
    assert steps.eq(STEPS).all()


def test_words_have_no_gradient() -> None:
    types = [TensorType((3, 2), "int64")]
    assert not OP.differentiates(range(1, 13), types, Attrs(lengths=False, noise=False))


def test_noise_is_added_to_the_logits() -> None:
    weights = weights_of(4, 5, 6)
    noise = torch.zeros(STEPS, 2, 6, dtype=torch.float64)
    noise[:, 0, 3] = noise[:, 1, 4] = 1e3
    attrs = Attrs(begin=BEGIN, end=END, max_steps=STEPS, lengths=False, noise=True)
    made, steps = OP.evaluate([torch.randint(13, (3, 2)), *weights, noise], attrs)
    assert made.tolist() == [[3] * STEPS, [4] * STEPS]
    assert steps.eq(STEPS).all()
