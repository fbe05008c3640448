"""Translations by a few launches for each word: which steps, the loop in a graph, right words."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch

import plantune
from plantune.base.canonical import Attrs
from plantune.devices.cuda import driver
from plantune.devices.cuda.build import compile_cuda
from plantune.devices.machine import cpu_environment, environment_of
from plantune.kernels.families import gru_translate, gru_translate_steps
from plantune.kernels.families.gru_translate_steps import FAMILY, TURN
from plantune.kernels.family import Candidate, Frame
from plantune.kernels.registry import why_not
from plantune.measure.numerics import check
from plantune.models.gru_translator import Sizes, greedy, gru_translator
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.proofs import remember_proof
from plantune.plans.guess import FALLBACK, Preference, compose
from plantune.runtime.calls import choose
from plantune.runtime.calls.call_table import CallTable
from plantune.runtime.calls.choose import NoStoredPlan
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space
from tests.kernels.families.test_gru_translate import (
    WHOLE,
    sentences,
    translation,
    translator_on_a_gpu,
    without_tf32,
)

CONFIG = Attrs(rows=2)
__all__ = ["without_tf32"]
REFUSED = {
    "an odd embedding": (translation(Sizes(9, 9, 96, 256)), "whole vectors of 128"),
    "an odd state": (translation(Sizes(9, 9, 128, 192)), "whole vectors of 128, got 192"),
    "many sentences": (translation(samples=4097), "4097 sentences, 4096 fit"),
    "no step": (translation(steps=0), "no step to make"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_refuses(step_of, case):
    emit, reason = REFUSED[case]
    assert reason in str(FAMILY.why_not_step(step_of(emit, "float32")))


@pytest.mark.parametrize("arch", ["sm70", "sm80", "sm90", "sm120"])
def test_other_chips_have_it_too(step_of, arch):
    step, space = step_of(translation(WHOLE), "float32"), load_search_space(arch)
    assert why_not(step, Candidate(FAMILY.name, CONFIG), space) is None
    wide = step_of(translation(Sizes(9, 9, 512, 1152)), "float32")
    reason = str(why_not(wide, Candidate(FAMILY.name, CONFIG), space))
    assert reason == "a thread would hold 156 weights"


def test_a_guess_takes_it_where_the_blocks_of_one_launch_do_not_fit(step_of):
    step = step_of(translation(WHOLE, 1), "float32")
    for count, wanted in ((132, "gru_translate"), (114, "gru_translate_steps")):
        space = load_search_space("sm90").with_multiprocessors(count)
        legal = [
            (family.estimate_us(family.parts(step), config, space.arch), family.name)
            for family in (gru_translate_steps.FAMILY, gru_translate.FAMILY)
            for config in space.configs(family.name)
            if why_not(step, Candidate(family.name, config), space) is None
        ]
        assert min(legal)[1] == wanted


class Lent:
    """A pool that makes nothing."""

    def __init__(self, checked, owned, *, frozen):
        self.checked, self.owned = checked, owned
        self.graph, self.plan, self.space = checked.graph, checked.plan, checked.space
        self.frozen, self.match = frozen, None

    def lend(self):
        return self

    def release(self):
        """Nothing was taken."""

    def lay_out(self, call, *, in_rows):
        """No result comes of it."""


def test_a_stored_plan_of_a_whole_gpu_gives_way_to_it_with_a_warning(monkeypatch):
    """The choice of a plan, as for a GPU that is not here."""
    model, words = gru_translator().eval(), torch.zeros(14, 8, dtype=torch.int64)
    space = load_search_space("sm90")
    spaces = [space]
    here = replace(cpu_environment(), arch="sm90")
    monkeypatch.setattr(CallTable, "space", lambda self: spaces[0])
    monkeypatch.setattr(choose, "environment_of", lambda device: here)
    monkeypatch.setattr(choose, "recheck", lambda *given: None)
    monkeypatch.setattr(choose, "ProgramPool", Lent)
    guess = plantune.optimize(model, words, fallback="silent").plan
    with PlanDatabase.open() as database:
        database.put_plan(guess, here)
    stored = plantune.optimize(model, words, fallback="error").plan
    assert [choice.candidate.family for choice in stored.choices] == ["gru_translate"]
    spaces[0] = space.with_multiprocessors(114)
    tuned = plantune.optimize(model, words)
    with pytest.warns(NoStoredPlan, match="128 blocks must run at once on 114 multiprocessors"):
        plan = tuned.plan
    assert [choice.candidate.family for choice in plan.choices] == [FAMILY.name]


@pytest.mark.parametrize(
    ("arguments", "struct", "header"),
    [
        (gru_translate.Arguments, "TranslateArguments", "translate"),
        (gru_translate_steps.Arguments, "StepArguments", "steps"),
    ],
)
def test_arguments_are_where_the_kernel_reads_them(arguments, struct, header):
    fields = [name for kind in arguments.__mro__ for name, _ in vars(kind).get("_fields_", ())]
    assert len(fields) == 17 + (4 if header == "translate" else 7)
    source = f'#include "cuda/gru_translator/{header}.h"\n'
    for name in fields:
        place = f"__INTADDR__(&((plantune::{struct}*)0)->{name})"  # as NVRTC spells offsetof
        source += f'static_assert({place} == {getattr(arguments, name).offset}, "{name}");\n'
    source += f'extern "C" __global__ void run(plantune::{struct}) {{}}\n'
    compile_cuda(source, load_arch("sm90"))


class Recorded:
    """A kernel that keeps what it is launched with, and where."""

    launched: ClassVar = []

    def __init__(self, binary, name):
        self.name = name

    def launch(self, stream, grid, threads, arguments, *, shared_bytes=0):
        self.launched.append((self.name, grid[0], arguments[1:]))

    def add_to(self, loop, grid, threads, arguments, *, shared_bytes=0):
        loop.append((self.name, grid[0], arguments[1:]))


@pytest.fixture
def run(step_of, monkeypatch):
    monkeypatch.setattr(gru_translate_steps, "Kernel", Recorded)
    monkeypatch.setattr(Recorded, "launched", [])
    step = step_of(translation(samples=2, length=3, steps=6), "float32")
    values = {
        name: torch.zeros(t.shape, dtype=t.torch_dtype) for name, t in (*step.inputs, *step.outputs)
    }
    binding = FAMILY.bind(FAMILY.parts(step), CONFIG, Frame(values))
    return lambda: binding.launch(0)


def test_outside_of_a_graph_all_words_are_launched(run, monkeypatch):
    monkeypatch.setattr(gru_translate_steps, "can_loop", lambda: False)
    run()
    names = [name for name, *_ in Recorded.launched]
    words = ["advance", "run"] * 6
    assert names == ["begin", *["read_word"] * 3, "add_context", *words, "finish"]
    places = [rest[0].value for name, _, rest in Recorded.launched if name == "read_word"]
    assert places == [0, 1, 2]
    assert {rest[0].value for name, _, rest in Recorded.launched if name == "run"} == {0}


def test_in_a_graph_words_are_a_loop(run, monkeypatch):
    class Body(list):
        handle = 77

    body = Body()
    monkeypatch.setattr(gru_translate_steps, "can_loop", lambda: True)
    monkeypatch.setattr(driver, "capture_of", lambda stream: (1, None))
    monkeypatch.setattr(gru_translate_steps, "add_loop", lambda stream, fill: fill(body))
    run()
    names = [name for name, *_ in Recorded.launched]
    assert names == ["begin", *["read_word"] * 3, "add_context", "finish"]
    assert [name for name, *_ in body] == ["advance", "run"] * TURN
    assert {rest[0].value for name, _, rest in body if name == "run"} == {77}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "given"),
    [
        (1, {"sizes": WHOLE, "samples": 1, "length": 5, "lengths": False}),
        (4, {"sizes": WHOLE, "samples": 9}),
        (2, {"samples": 4, "length": 7, "noise": True}),
        (4, {"sizes": Sizes(40, 9, 256, 128), "samples": 3, "length": 2}),
    ],
)
def test_it_is_right(step_of, gpu_space, rows, given):
    step = step_of(translation(**given, steps=9), "float32")
    assert check(step, Candidate(FAMILY.name, Attrs(rows=rows)), gpu_space).deterministic


def run_by(family, model, *given):
    """The model from a plan of that family."""
    found = plantune.optimize(model, *given, fallback="silent")
    graph, space = found._calls.expected_graph(), found._calls._table.space()
    preferences = (Preference(family), *FALLBACK)
    plan = compose(graph, space, network="by hand", preferences=preferences)
    remember_proof(plan, environment_of(torch.device("cuda", 0)))
    return plantune.optimize(model, *given, plan=plan)


@pytest.mark.gpu
@pytest.mark.parametrize("family", [FAMILY.name, "gru_translate"])
@pytest.mark.parametrize("samples", [1, 8])
def test_of_equal_logits_the_first_word_is_taken(family, samples):
    """Whichever blocks have them."""
    model, given = translator_on_a_gpu(), sentences(samples)
    output = model.decoder.output
    for words in ([70, 71, 2500, 5892], [46, 4000], [5892]):
        output.weight.data.zero_()
        output.bias.data.zero_()[words] = 2.0
        tuned = run_by(family, model, *given)
        assert tuned(*given)[0].eq(words[0]).all()
        assert [choice.candidate.family for choice in tuned.plan.choices] == [family]


@pytest.mark.gpu
@pytest.mark.usefixtures("without_tf32")
@pytest.mark.parametrize("samples", [1, 8])
def test_a_captured_loop_says_the_words_of_eager_float32(samples):
    """Whether all sentences end early or none does, and in the memory of each caller."""
    model, ends = translator_on_a_gpu(), set()
    tuned = run_by(FAMILY.name, model, *sentences(samples))
    for _ in range(20):
        given = sentences(samples)
        words, steps = tuned(*given)
        wanted = greedy(model, *given)
        assert torch.equal(words, wanted[0])
        assert torch.equal(steps, wanted[1])
        ends |= set(steps.tolist())
    assert len(ends) > 5
    assert [c.candidate.family for c in tuned.plan.choices] == [FAMILY.name]
    assert tuned.last_call().how == "captured"


@pytest.mark.gpu
@pytest.mark.usefixtures("without_tf32")
def test_a_stored_plan_whose_blocks_do_not_fit_here_is_replaced_by_it(monkeypatch):
    """As on a part of a GPU."""
    model, given = translator_on_a_gpu(), sentences(8)
    plan = plantune.optimize(model, *given, fallback="silent").plan
    with PlanDatabase.open() as database:
        database.put_plan(plan, environment_of(torch.device("cuda", 0)))
    few = load_search_space("sm90").with_multiprocessors(114)
    monkeypatch.setattr(CallTable, "space", lambda self: few)
    tuned = plantune.optimize(model, *given)
    with pytest.warns(NoStoredPlan, match="128 blocks must run at once on 114 multiprocessors"):
        tuned(*given)
    assert [choice.candidate.family for choice in tuned.plan.choices] == [FAMILY.name]
    assert all(map(torch.equal, tuned(*given), greedy(model, *given)))
    assert tuned.last_call().how == "captured"
