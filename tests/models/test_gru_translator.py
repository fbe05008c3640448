"""The translator beside torch's own modules, eagerly and through a plan."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

import plantune
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.models.gru_translator import (
    END,
    GRUTranslator,
    Sizes,
    difference,
    greedy,
    gru_translator,
)

SMALL = Sizes(source_words=60, target_words=45, embedding=8, hidden=16)


def made(sizes: Sizes, seed: int = 0) -> GRUTranslator:
    """One that says different words, and ends some sentences early."""
    torch.manual_seed(seed)
    model = gru_translator(sizes).eval()
    with torch.no_grad():
        model.decoder.output.weight *= 2
        model.decoder.output.bias[END] += 1.2 if sizes == Sizes() else 0.3
    return model


def sentences(sizes: Sizes, words: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.randint(sizes.source_words, (words, samples))
    return source, torch.randint(1, words + 1, (samples,))


@pytest.mark.parametrize("samples", [1, 8, 64])
def test_a_translation_is_what_torchs_modules_make_step_by_step(samples: int) -> None:
    model = made(SMALL)
    ends = set()
    for steps in (1, 2, 7, 25):
        source, lengths = sentences(SMALL, 9, samples)
        words, counts = model(source, lengths, max_steps=steps)
        wanted, wanted_counts = greedy(model, source, lengths, steps)
        assert torch.equal(words, wanted)
        assert torch.equal(counts, wanted_counts)
        ends |= set(counts.tolist())
    assert samples == 1 or len(ends) > 4


def test_the_whole_translator_says_the_words_of_eager_float32() -> None:
    """As many sentences as a test has time for; tools/studies/translate compares 1,000."""
    model = made(Sizes())
    source, lengths = sentences(Sizes(), 12, 24)
    words, counts = model(source, lengths, max_steps=12)
    wanted, wanted_counts = greedy(model, source, lengths, 12)
    assert torch.equal(words, wanted)
    assert torch.equal(counts, wanted_counts)
    assert words.unique().numel() > 100


@pytest.mark.parametrize(("part", "is_tie"), [(1e-6, True), (2.5e-6, True), (3.5e-6, False)])
def test_words_whose_logits_are_closer_than_float32_can_tell_are_a_tie(
    part: float, is_tie: bool
) -> None:
    """By float64: as parts of the largest logit."""
    model = made(SMALL)
    source, lengths = sentences(SMALL, 9, 1)
    words = greedy(model, source, lengths)[0][0]
    other = (words[0] + 1) % SMALL.target_words
    output = model.decoder.output
    logits = deepcopy(model).double().logits(source, lengths, torch.zeros(1, 1, dtype=torch.int64))
    with torch.no_grad():
        output.weight[other] = output.weight[words[0]]
        output.bias[other] = output.bias[words[0]] - part * logits.abs().max()
    others = torch.cat((other[None], words[1:]))
    found = difference(model, source[:, 0], lengths, words, others)
    assert found.word == 0
    assert found.margin == pytest.approx(part, rel=0.05)
    assert found.is_tie == is_tie
    assert difference(model, source[:, 0], lengths, others, words).is_tie == is_tie


def test_a_translation_is_one_node_of_the_graph() -> None:
    source, lengths = TensorType((9, 8), "int64"), TensorType((8,), "int64")
    graph = extract(gru_translator(SMALL).eval(), source, lengths)
    assert [node.op for node in graph.nodes] == ["gru_translate"]
    assert len(graph.parameters) == 12
    (alone,) = extract(gru_translator(SMALL).eval(), source).nodes
    assert not alone.attrs["lengths"]


def test_a_tuned_translator_translates_alike_and_follows_its_weights() -> None:
    model = made(SMALL)
    source, lengths = sentences(SMALL, 9, 8)
    tuned = plantune.optimize(model, source, lengths, fallback="silent")
    for seed in range(3):
        source, lengths = sentences(SMALL, 9, 8)
        tuned.load_state_dict(made(SMALL, seed).state_dict())
        assert all(map(torch.equal, tuned(source, lengths), tuned.reference(source, lengths)))
        wanted = greedy(made(SMALL, seed), source, lengths)
        assert all(map(torch.equal, tuned(source, lengths), wanted))


def test_training_with_target_words_has_the_gradients_of_eager() -> None:
    model = made(SMALL).train()
    source, lengths = sentences(SMALL, 5, 4)
    target = torch.randint(SMALL.target_words, (6, 4))
    tuned = plantune.optimize(model, source, lengths, target, mode="train", fallback="silent")
    seed = torch.randn(6, 4, SMALL.target_words)
    for each in (model, tuned):
        (each(source, lengths, target) * seed).sum().backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    for name, parameter in tuned.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-5)


def test_words_are_drawn_by_their_probabilities() -> None:
    """Of the first word, in many sentences that are alike."""
    model, samples = made(SMALL), 4000
    source = torch.randint(SMALL.source_words, (3, 1)).expand(-1, samples)
    logits = model(source[:, :1], None, torch.zeros(1, 1, dtype=torch.int64))[0, 0]
    for temperature in (0.5, 2.0):
        words, _ = model(source, max_steps=1, temperature=temperature)
        found = torch.bincount(words[:, 0], minlength=SMALL.target_words) / samples
        wanted = torch.softmax(logits.detach() / temperature, 0)
        assert (found - wanted).abs().max() < 5 * (0.25 / samples) ** 0.5


def test_the_likeliest_words_come_with_their_log_probabilities() -> None:
    model = made(SMALL)
    source, lengths = sentences(SMALL, 9, 8)
    words, steps, likely, scores = model(source, lengths, max_steps=12, top=3)
    assert torch.equal(words, greedy(model, source, lengths, 12)[0])
    before = torch.cat((torch.zeros(1, 8, dtype=torch.int64), words.t()[:-1]))
    logits = model(source, lengths, before).detach().log_softmax(2).transpose(0, 1)
    best = logits.topk(3)
    there = torch.arange(12) < steps[:, None]
    assert 0 < int(there.sum()) < there.numel()
    assert torch.equal(likely[there], best.indices[there])
    torch.testing.assert_close(scores[there], best.values[there])
    assert likely[~there].eq(END).all()
    assert scores[~there].eq(0).all()


@pytest.mark.parametrize("options", [{"temperature": 0.7}, {"top": 2}], ids=str)
def test_drawn_and_scored_words_come_from_a_plan_too(options: dict[str, float]) -> None:
    model = made(SMALL)
    given = sentences(SMALL, 9, 8)
    tuned = plantune.optimize(model, *given, **options, fallback="silent")
    torch.manual_seed(5)
    wanted = model(*given, **options)
    torch.manual_seed(5)
    assert all(map(torch.equal, tuned(*given, **options), wanted))
