"""Translations in one launch: which steps, that the kernel builds, that its words are right."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from subprocess import PIPE
from typing import ClassVar

import pytest
import torch

import plantune
from plantune.base.canonical import Attrs
from plantune.devices.cuda.flags import plain_float32
from plantune.errors import BuildError
from plantune.kernels.families import gru_translate
from plantune.kernels.families.gru_translate import FAMILY
from plantune.kernels.family import Candidate, Frame
from plantune.kernels.recurrent import gru_encoder
from plantune.kernels.registry import candidates, why_not
from plantune.measure.numerics import check
from plantune.models.gru_translator import END, Sizes, difference, greedy, gru_translator
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

CONFIG = Attrs(samples=1, launches=1)
ARCH = load_arch("sm90")
WHOLE, SMALL = Sizes(), Sizes(300, 900, 128, 256)


def translation(sizes=SMALL, samples=2, length=3, lengths=True, steps=6, end=1, noise=False):
    def emit(b):
        e, h, words = sizes.embedding, sizes.hidden, sizes.target_words
        encoder, decoder = (
            (b.w(3 * h, width), b.w(3 * h, h), b.w(3 * h), b.w(3 * h)) for width in (e, e + h)
        )
        weights = (b.w(sizes.source_words, e), *encoder, b.w(words, e), *decoder)
        weights = (*weights, b.w(words, e + 2 * h), b.w(words))
        given = [b.x(length, samples, dtype="int64")]
        given += [b.x(samples, dtype="int64")] if lengths else []
        added = [b.x(steps, samples, words)] if noise else []
        loop = {"begin": 0, "end": end, "max_steps": steps, "lengths": lengths, "noise": noise}
        return b.all("gru_translate", *given, *weights, *added, **loop)

    return emit


REFUSED = {
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


def test_one_sentence_is_translated_within_the_registers(step_of, build_within_limits):
    build_within_limits(FAMILY, step_of(translation(WHOLE, 1), "float32"), CONFIG, ARCH)


@pytest.mark.parametrize(
    ("sizes", "samples", "launches"),
    [(WHOLE, 8, 1), (WHOLE, 32, 2), (SMALL, 3, 1), (Sizes(9, 9, 256, 256), 1, 1)],
)
def test_it_builds_for_more_sentences_and_other_sizes(step_of, sizes, samples, launches):
    config = Attrs(samples=samples, launches=launches)
    step = step_of(translation(sizes, samples), "float32")
    assert why_not(step, Candidate("gru_translate", config), load_search_space("sm90")) is None
    used = FAMILY.build(FAMILY.parts(step), config, ARCH).usage["run"]
    assert used.registers * 512 <= 65536
    assert used.spill_bytes < 64  # a few addresses, beside 250 bytes of weights in each thread


def test_many_sentences_are_translated_in_several_launches(step_of):
    step, space = step_of(translation(samples=48), "float32"), load_search_space("sm90")
    legal = [c.config for c in candidates(step, space) if c.family == "gru_translate"]
    found = [(config["samples"], config["launches"]) for config in legal]
    assert found == [(n, launches) for n in (1, 2, 3, 4, 6, 8, 16) for launches in (1, 2)]
    five = Candidate("gru_translate", Attrs(samples=5, launches=1))
    assert "5 at a time do not make 48" in str(why_not(step, five, space))


def test_one_word_is_read_where_it_is_translated(step_of):
    step, config = step_of(translation(length=1), "float32"), Attrs(samples=2, launches=2)
    reason = why_not(step, Candidate("gru_translate", config), load_search_space("sm90"))
    assert reason == "one word is read as fast beside the translation"


@pytest.mark.parametrize(("samples", "launches"), [(1, 1), (8, 1), (32, 2), (64, 2)])
def test_many_sentences_are_read_by_a_launch_of_its_own(step_of, samples, launches):
    """By the guess."""
    step, space = (
        step_of(translation(WHOLE, samples, 14, steps=14), "float32"),
        load_search_space("sm90"),
    )
    parts = FAMILY.parts(step)
    legal = [c.config for c in candidates(step, space) if c.family == "gru_translate"]
    best = min(legal, key=lambda config: FAMILY.estimate_us(parts, config, space.arch))
    assert best["launches"] == launches


class Recorded:
    """A kernel that keeps what it is launched with."""

    launched: ClassVar = []

    def __init__(self, binary, name="run", *, cooperative=False):
        assert cooperative == (name != "embed")
        self.name = name

    def blocks_at_once(self, threads, shared_bytes):
        return 132

    def launch(self, stream, grid, threads, arguments, *, shared_bytes=0):
        self.launched.append((self.name, grid[0], arguments[0]))
        if self.name == "embed":
            words, table, x = arguments
            x.copy_(table[words])


def test_the_translation_begins_from_what_the_encoder_made(step_of, monkeypatch):
    for module in (gru_translate, gru_encoder):
        monkeypatch.setattr(module, "Kernel", Recorded)
    monkeypatch.setattr(Recorded, "launched", [])
    step, config = step_of(translation(samples=4), "float32"), Attrs(samples=2, launches=2)
    parts = FAMILY.parts(step)
    values = {
        name: torch.randint(3, t.shape) if t.dtype == "int64" else torch.randn(t.shape)
        for name, t in (*step.inputs, *step.outputs)
    }
    room = torch.empty(FAMILY.workspace_bytes(parts, config), dtype=torch.uint8)
    FAMILY.bind(parts, config, Frame(values, workspace=room)).launch(0)
    (embed, rows, _), (encode, blocks, given), *rest = Recorded.launched
    assert (embed, rows) == ("embed", 3 * 4)
    assert (encode, blocks, given.steps, given.samples) == ("encode", 16, 3, 4)
    assert [(name, a.source, a.source_length, a.read) for name, _, a in rest] == [
        ("run", None, 0, 3)
    ] * 2
    assert [a.states - given.y for *_, a in rest] == [0, 2 * SMALL.hidden * 4]
    words, weights = (values[name] for name in (parts.words[0], parts.weights[0]))
    start = given.gates - room.data_ptr()
    gates = room[start : start + 3 * 4 * 3 * SMALL.hidden * 4].view(torch.float32).view(3, 4, -1)
    wanted = torch.nn.functional.linear(
        weights[words], values[parts.weights[1]], values[parts.weights[3]]
    )
    torch.testing.assert_close(gates, wanted)


class TooFew:
    """A kernel of which only some blocks fit beside each other."""

    def __init__(self, binary, *, cooperative):
        assert cooperative

    def blocks_at_once(self, threads, shared_bytes):
        return 63


def test_it_does_not_begin_where_its_blocks_do_not_fit(step_of, monkeypatch):
    """A search would time torch's loop under its name."""
    monkeypatch.setattr(gru_translate, "Kernel", TooFew)
    step = step_of(translation(), "float32")
    with pytest.raises(BuildError, match="64 blocks must run at once, 63 can"):
        FAMILY.bind(FAMILY.parts(step), CONFIG, Frame({}))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("together", "launches", "given"),
    [
        (1, 1, {"sizes": WHOLE, "samples": 1, "length": 5, "lengths": False}),
        (8, 1, {"sizes": WHOLE, "samples": 8}),
        (1, 1, {"samples": 1, "length": 1}),
        (1, 1, {"samples": 1, "length": 2, "noise": True}),
        (2, 1, {"samples": 4, "length": 7, "noise": True}),
        (5, 1, {"samples": 5, "length": 4, "lengths": False}),
        (32, 1, {"samples": 64, "length": 4, "noise": True}),
        (8, 2, {"sizes": WHOLE, "samples": 8}),
        (32, 2, {"samples": 64, "length": 4, "noise": True}),
        (5, 2, {"samples": 35, "length": 4, "lengths": False}),
        (3, 1, {"sizes": Sizes(40, 9, 256, 256), "samples": 3, "length": 2}),
    ],
)
def test_it_is_right(step_of, gpu_space, together, launches, given):
    config = Attrs(samples=together, launches=launches)
    step = step_of(translation(**given, steps=9), "float32")
    assert check(step, Candidate("gru_translate", config), gpu_space).deterministic


def translator_on_a_gpu():
    """It says different words, and ends its sentences early or never."""
    torch.manual_seed(3)
    model = gru_translator().cuda().eval()
    with torch.no_grad():
        model.decoder.output.weight *= 2
        model.decoder.output.bias[END] += 1.2
    return model


def sentences(samples):
    source = torch.randint(7853, (20, samples), device="cuda")
    return source, torch.randint(1, 21, (samples,), device="cuda")


@pytest.fixture
def without_tf32():
    """Eager's layer computes in tf32 by default, and says other words then."""
    with plain_float32():
        yield


@pytest.mark.gpu
@pytest.mark.usefixtures("without_tf32")
@pytest.mark.parametrize("samples", [1, 8, 64])
def test_a_tuned_translator_says_the_words_of_eager_float32(samples):
    model, ends = translator_on_a_gpu(), set()
    tuned = plantune.optimize(model, *sentences(samples), fallback="silent")
    for _ in range(20):
        given = sentences(samples)
        words, steps = tuned(*given)
        wanted = greedy(model, *given)
        for n in (words != wanted[0]).any(1).nonzero()[:, 0].tolist():
            parts = difference(model, given[0][:, n], given[1][n], wanted[0][n], words[n])
            assert parts.is_tie, parts
        ends |= set(steps.tolist())
    assert len(ends) > 5
    assert [c.candidate.family for c in tuned.plan.choices] == ["gru_translate"]


@pytest.mark.gpu
@pytest.mark.usefixtures("without_tf32")
@pytest.mark.parametrize("samples", [1, 8])
def test_launches_of_two_threads_do_not_hear_each_other(samples):
    """All blocks of each must run at once; on one GPU there is room for one launch."""
    model = translator_on_a_gpu()
    tuned = plantune.optimize(model, *sentences(samples), fallback="silent")
    given = [sentences(samples) for _ in range(20)]
    wanted = [greedy(model, *each) for each in given]

    def wrong(_):
        with torch.cuda.stream(torch.cuda.Stream()):
            made = [tuned(*each) for _ in range(10) for each in given]
            return sum(
                not all(map(torch.equal, *pair)) for pair in zip(made, wanted * 10, strict=True)
            )

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(wrong, range(2))) == [0, 0]


# Says when it is ready, waits for a word, then counts the calls whose words are not those of the
# first time.
PROCESS = """
import torch, plantune
from plantune.models.gru_translator import gru_translator
torch.manual_seed(3)
model = gru_translator().cuda().eval()
given = [(torch.randint(7853, (20, 8), device="cuda"), torch.full((8,), 20, device="cuda"))
         for _ in range(20)]
tuned = plantune.optimize(model, *given[0], fallback="silent")
wanted = [tuned(*each) for each in given]
print("ready", flush=True)
input()
made = [(tuned(*each), first) for _ in range({rounds}) for each, first in zip(given, wanted)]
print(sum(not all(map(torch.equal, *pair)) for pair in made))
"""


def translating(rounds):
    """A process that is ready to translate."""
    code = PROCESS.format(rounds=rounds)
    process = subprocess.Popen([sys.executable, "-c", code], stdin=PIPE, stdout=PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def begin(*processes):
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()


@pytest.mark.gpu
def test_launches_of_two_processes_do_not_hear_each_other():
    with translating(rounds=100) as first, translating(rounds=100) as second:
        begin(first, second)
        assert [process.stdout.read() for process in (first, second)] == ["0\n", "0\n"]
    assert [first.returncode, second.returncode] == [0, 0]


@pytest.mark.gpu
def test_launches_that_were_aborted_leave_nothing_behind():
    """Those of a process that is killed in the midst of its launches."""
    with translating(rounds=100_000) as killed:
        begin(killed)
        time.sleep(0.2)
        killed.kill()
    with translating(rounds=5) as after:
        begin(after)
        assert after.stdout.read() == "0\n"
    assert after.returncode == 0
