"""Translations in one launch: which steps, that the kernel builds, that its words are right."""

from __future__ import annotations

import pytest
import torch

import plantune
from plantune.canonical import Attrs
from plantune.kernels.families import gru_translate
from plantune.kernels.families.gru_translate import FAMILY
from plantune.kernels.family import Candidate, Frame
from plantune.kernels.registry import why_not
from plantune.measure.numerics import check
from plantune.models.gru_translator import END, Sizes, greedy, gru_translator
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

CONFIG = Attrs(threads=512)
ARCH = load_arch("sm90")
WHOLE, SMALL = Sizes(), Sizes(300, 900, 128, 256)


def translation(sizes=SMALL, samples=2, length=3, lengths=True, steps=6, end=1):
    def emit(b):
        e, h, words = sizes.embedding, sizes.hidden, sizes.target_words
        encoder, decoder = (
            (b.w(3 * h, width), b.w(3 * h, h), b.w(3 * h), b.w(3 * h)) for width in (e, e + h)
        )
        weights = (b.w(sizes.source_words, e), *encoder, b.w(words, e), *decoder)
        weights = (*weights, b.w(words, e + 2 * h), b.w(words))
        given = [b.x(length, samples, dtype="int64")]
        given += [b.x(samples, dtype="int64")] if lengths else []
        loop = {"begin": 0, "end": end, "max_steps": steps, "lengths": lengths}
        return b.all("gru_translate", *given, *weights, **loop)

    return emit


REFUSED = {
    "nine sentences": (translation(samples=9), "at most 8 sentences at once, got 9"),
    "an odd embedding": (translation(Sizes(9, 9, 96, 256)), "whole vectors of 128"),
    "a small state": (translation(Sizes(9, 9, 128, 128)), "fill blocks by 256"),
    "many words": (translation(Sizes(9, 4000, 128, 256)), "4000 words need more registers"),
    "no such end": (translation(end=900), "a word that there is not"),
    "no step": (translation(steps=0), "no step to make"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_refuses(step_of, case):
    emit, reason = REFUSED[case]
    assert reason in str(FAMILY.why_not_step(step_of(emit, "float32")))


def test_it_computes_in_float32_alone(step_of):
    assert "float32, got float16" in str(FAMILY.why_not_step(step_of(translation(), "float16")))


def test_all_blocks_must_run_at_once(step_of):
    step = step_of(translation(Sizes(9, 9, 128, 768)), "float32")
    space = load_search_space("sm90")
    reason = why_not(step, Candidate("gru_translate", CONFIG), space)
    assert reason == "192 blocks must run at once on 132 multiprocessors"


@pytest.mark.parametrize(
    ("sizes", "samples"), [(WHOLE, 1), (WHOLE, 8), (SMALL, 3), (Sizes(9, 9, 256, 256), 1)]
)
def test_it_builds_within_the_registers_of_a_multiprocessor(
    step_of, build_within_limits, sizes, samples
):
    step = step_of(translation(sizes, samples), "float32")
    assert why_not(step, Candidate("gru_translate", CONFIG), load_search_space("sm90")) is None
    build_within_limits(FAMILY, step, CONFIG, ARCH)


class TooFew:
    """A kernel of which only some blocks fit beside each other."""

    def __init__(self, binary, *, cooperative):
        assert cooperative

    def blocks_at_once(self, threads, shared_bytes):
        return 63


def test_where_its_blocks_do_not_fit_torch_translates(step_of, monkeypatch):
    monkeypatch.setattr(gru_translate, "Kernel", TooFew)
    step = step_of(translation(), "float32")
    parts = FAMILY.parts(step)
    values = {
        name: torch.randint(3, t.shape) if t.dtype == "int64" else torch.randn(t.shape)
        for name, t in step.inputs
    }
    wanted = step.evaluate(values)
    made = {name: torch.full(t.shape, -7) for name, t in step.outputs}
    FAMILY.bind(parts, CONFIG, Frame({**values, **made})).launch(0)
    assert all(torch.equal(made[name], wanted[name]) for name in made)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sizes", "samples", "length", "lengths"),
    [
        (WHOLE, 1, 5, False),
        (WHOLE, 8, 3, True),
        (SMALL, 1, 1, True),
        (SMALL, 2, 7, True),
        (SMALL, 5, 4, False),
        (Sizes(40, 9, 256, 256), 3, 2, True),
    ],
)
def test_it_is_right(step_of, gpu_space, sizes, samples, length, lengths):
    step = step_of(translation(sizes, samples, length, lengths, steps=9), "float32")
    assert check(step, Candidate("gru_translate", CONFIG), gpu_space).deterministic


@pytest.mark.gpu
@pytest.mark.parametrize("samples", [1, 8])
def test_a_tuned_translator_says_the_words_of_eager_float32(gpu_space, samples):
    torch.manual_seed(3)
    model = gru_translator().cuda().eval()
    with torch.no_grad():
        model.decoder.output.weight *= 2
        model.decoder.output.bias[END] += 1.2
    source = torch.randint(7853, (20, samples), device="cuda")
    tuned = plantune.optimize(
        model, source, torch.full((samples,), 20, device="cuda"), fallback="silent"
    )
    ends = set()
    for _ in range(20):
        source = torch.randint(7853, (20, samples), device="cuda")
        lengths = torch.randint(1, 21, (samples,), device="cuda")
        words, steps = tuned(source, lengths)
        wanted = greedy(model, source, lengths)
        assert torch.equal(words, wanted[0])
        assert torch.equal(steps, wanted[1])
        ends |= set(steps.tolist())
    assert len(ends) > 5
    assert [c.candidate.family for c in tuned.plan.choices] == ["gru_translate"]
