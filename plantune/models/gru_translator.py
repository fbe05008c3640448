"""A GRU encoder and decoder that translates sentences of words, greedily.

The encoder's last hidden state is the context: the decoder begins from it, and reads it in every
step beside the word before.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plantune.graph.operators.gru_translate import OPERATOR, TOP_OPERATOR

BEGIN, END = 0, 1  # what a translation begins after and ends with, among the target words
MAX_STEPS = 25
TIE = 3e-6  # of a logit


@dataclass(frozen=True)
class Sizes:
    source_words: int = 7853
    target_words: int = 5893
    embedding: int = 256
    hidden: int = 512


class Encoder(nn.Module):
    """Source words (S, N) to the context (N, hidden)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.source_words, sizes.embedding)
        self.gru = nn.GRU(sizes.embedding, sizes.hidden)

    def forward(self, source: Tensor, lengths: Tensor | None = None) -> Tensor:
        states, last = self.gru(self.embedding(source))
        if lengths is None:
            return last[0]
        return states[lengths - 1, torch.arange(source.shape[1], device=states.device)]


class Decoder(nn.Module):
    """One step: words (N,), hidden and context (N, hidden) to logits and the next hidden."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.target_words, sizes.embedding)
        self.gru = nn.GRU(sizes.embedding + sizes.hidden, sizes.hidden)
        self.output = nn.Linear(sizes.embedding + 2 * sizes.hidden, sizes.target_words)

    def forward(self, words: Tensor, hidden: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(words)
        states, last = self.gru(torch.cat((x, context), 1)[None], hidden[None])
        return self.output(torch.cat((x, states[0], context), 1)), last[0]


class GRUTranslator(nn.Module):
    """Source words (S, N), of which with `lengths` (N,) only so many of each sentence count."""

    def __init__(self, sizes: Sizes | None = None) -> None:
        super().__init__()
        self.sizes = sizes or Sizes()
        self.encoder = Encoder(self.sizes)
        self.decoder = Decoder(self.sizes)

    def forward(
        self,
        source: Tensor,
        lengths: Tensor | None = None,
        target: Tensor | None = None,
        max_steps: int = MAX_STEPS,
        *,
        temperature: float = 0.0,
        top: int = 0,
    ) -> Tensor | tuple[Tensor, ...]:
        """With `target` words (T, N), as it is trained: the logits (T, N, target_words) of the word
        after each of them. Without, the translation: words (N, max_steps), which are END from the
        end on, and how many there are until the end, with it; then, if asked for, the `top`
        likeliest words of each step (N, max_steps, top) and their log-probabilities.

        A translation takes the likeliest word in each step, of equal ones the first. Two logits
        that are nearer to each other than their rounding may come out either way round where sums
        are added in another order: see Difference. With a `temperature` it draws each word by the
        probabilities that logits divided by it have.
        """
        if target is not None:
            return self.logits(source, lengths, target)
        weights = [
            self.encoder.embedding.weight,
            *self.encoder.gru._flat_weights,
            self.decoder.embedding.weight,
            *self.decoder.gru._flat_weights,
            self.decoder.output.weight,
            self.decoder.output.bias,
        ]
        noise = self.noise(max_steps, source.shape[1], temperature) if temperature > 0 else None
        given = (source, lengths, weights, noise, BEGIN, END, max_steps)
        made: tuple[Tensor, ...] = TOP_OPERATOR(*given, top) if top else OPERATOR(*given)
        return made

    def noise(self, steps: int, samples: int, temperature: float) -> Tensor:
        """Added to the logits it makes the largest one a draw of the softmax: Gumbel's numbers."""
        bias = self.decoder.output.bias
        shape = (steps, samples, self.sizes.target_words)
        uniform = torch.rand(shape, dtype=bias.dtype, device=bias.device)
        return -temperature * torch.log(-torch.log(uniform.clamp_min(1e-30)))

    def logits(self, source: Tensor, lengths: Tensor | None, target: Tensor) -> Tensor:
        context = hidden = self.encoder(source, lengths)
        logits = []
        for words in target:
            step, hidden = self.decoder(words, hidden, context)
            logits.append(step)
        return torch.stack(logits)


@torch.no_grad()
def greedy(
    model: GRUTranslator,
    source: Tensor,
    lengths: Tensor | None = None,
    max_steps: int = MAX_STEPS,
) -> tuple[Tensor, Tensor]:
    """The translation step by step, as torch's modules run it: each step waits for the words."""
    context = hidden = model.encoder(source, lengths)
    samples = source.shape[1]
    words = source.new_full((samples,), BEGIN)
    made = source.new_full((samples, max_steps), END)
    ended = torch.zeros(samples, dtype=torch.bool, device=source.device)
    steps = source.new_zeros(samples)
    for step in range(max_steps):
        logits, hidden = model.decoder(words, hidden, context)
        words = torch.where(ended, END, logits.argmax(1))
        made[:, step] = words
        steps += ~ended
        ended |= words == END
        if ended.all():
            break
    return made, steps


@dataclass(frozen=True)
class Difference:
    """Where two translations of a sentence part: at this word, whose logits in float64 are `margin`
    apart, as a part of the largest logit; positive if the first translation's word has more.

    Both are right if float32 cannot tell the words apart: sums of some 1,000 products in two orders
    differ by so much.
    """

    word: int
    margin: float

    @property
    def is_tie(self) -> bool:
        return abs(self.margin) < TIE


@torch.no_grad()
def difference(
    model: GRUTranslator, source: Tensor, lengths: Tensor | None, words: Tensor, others: Tensor
) -> Difference:
    """That of two translations (words of one sentence) of a source (S,)."""
    exact, word = deepcopy(model).double(), int((words != others).nonzero()[0, 0])
    before = torch.cat((words.new_tensor([BEGIN]), words[:word]))
    of_one = None if lengths is None else lengths.reshape(1)
    logits = exact.logits(source[:, None], of_one, before[:, None])[word, 0]
    margin = (logits[words[word]] - logits[others[word]]) / logits.abs().max()
    return Difference(word, float(margin))


def gru_translator(sizes: Sizes | None = None) -> GRUTranslator:
    """The encoder and decoder with 7853 source and 5893 target words."""
    return GRUTranslator(sizes)
