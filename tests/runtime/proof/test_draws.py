"""Inputs that a proof draws: integers must make sense to what reads them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plantune.graph.tracing.arguments import Arguments
from plantune.graph.tracing.extract import extract_with_outputs
from plantune.runtime.proof.draws import drawn_inputs


class Read(nn.Module):
    """A table of 7 rows and one of 5."""

    def __init__(self, read):
        super().__init__()
        self.long, self.short, self.read = nn.Embedding(7, 3), nn.Embedding(5, 3), read

    def forward(self, *args):
        return self.read(self, *args)


def drawn(read, *examples):
    module = Read(read)
    arguments = Arguments.of(module, examples, {})
    graph, _ = extract_with_outputs(module, arguments)
    random = torch.Generator().manual_seed(0)
    return drawn_inputs(graph, arguments.examples, random)


WORDS = torch.zeros(40, 4, dtype=torch.long)
TABLES = {
    "a table": (lambda m, x: m.long(x), 7),
    "two tables": (lambda m, x: m.long(x) + m.short(x), 5),
    "a part of them": (lambda m, x: m.short(x[:, :2].reshape(-1)), 5),
}


@pytest.mark.parametrize(("read", "rows"), TABLES.values(), ids=TABLES)
def test_indices_are_drawn_from_all_rows_of_their_table(read, rows):
    (x,) = drawn(read, WORDS)
    assert sorted(set(x.flatten().tolist())) == [*range(rows)]
    assert x.dtype == torch.int64


def test_pixels_are_any_bytes():
    (x,) = drawn(lambda m, x: x.float() / 255, WORDS.byte())
    assert x.dtype == torch.uint8
    assert x.max() > 200


OTHERS = {
    "mask": (lambda m, x, mask: m.long(x).masked_fill(mask[..., None], 0), WORDS > 0),
    "offset": (lambda m, x, add: m.long(x + add), WORDS[0] + 2),
    "lengths": (
        lambda m, x, lengths: m.long(x) * (torch.arange(4) < lengths[:, None])[..., None],
        torch.arange(40),
    ),
}


@pytest.mark.parametrize(("read", "example"), OTHERS.values(), ids=OTHERS)
def test_what_must_fit_together_is_the_examples(read, example):
    _, other = drawn(read, WORDS, example)
    assert torch.equal(other, example)


def test_indices_that_are_computed_are_the_examples():
    (x,) = drawn(lambda m, x: m.long(x + 3), WORDS)
    assert torch.equal(x, WORDS)
