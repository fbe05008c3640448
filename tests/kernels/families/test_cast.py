"""Casts as launches of their own: in which layouts, and that each number is rounded once."""

from __future__ import annotations

import itertools

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.graph.layouts import MEMORY_FORMATS
from plantune.kernels.families.cast import FAMILY
from plantune.kernels.family import Candidate
from plantune.kernels.registry import resolve
from plantune.measure.trial import NUMBERS, Trial
from plantune.space.arch import load_arch

from .conftest import in_turns

SHAPES = {
    "image": (2, 64, 16, 16),
    "few channels": (3, 3, 64, 64),
    "odd channels": (2, 7, 9, 9),
    "odd pixels": (2, 512, 7, 7),
    "half words of pixels": (2, 136, 6, 6),
    "eight channels": (2, 8, 30, 31),
    "large odd pixels": (1, 72, 113, 113),
    "one pixel": (5, 24, 1, 1),
    "rows": (37, 129),
    "one number": (1,),
}
PAIRS = [
    ("float32", "float16"),
    ("float32", "bfloat16"),
    ("float16", "float32"),
    ("bfloat16", "float32"),
    ("float16", "bfloat16"),
    ("uint8", "float16"),
    ("uint8", "float32"),
]
LAYOUTS = [*itertools.product(MEMORY_FORMATS, repeat=2)]


def cast(shape, source, result):
    return lambda b: b("cast", b.x(*shape, dtype=source), dtype=result)


def configs(step):
    """Every legal one."""
    found = [Attrs(source_layout=read, layout=made) for read, made in LAYOUTS]
    parts = FAMILY.parts(step)
    return [c for c in found if FAMILY.why_not_config(parts, c, load_arch("sm90")) is None]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("source", "result"), PAIRS)
def test_it_reads_and_makes_every_layout_of_images(step_of, name, source, result):
    step = step_of(cast(SHAPES[name], source, result), "float16")
    legal = configs(step)
    assert len(legal) == (4 if len(SHAPES[name]) == 4 and name != "odd channels" else len(legal))
    assert Attrs(source_layout="nchw", layout="nchw") in legal
    for config in legal if len(SHAPES[name]) == 4 else ():
        made = FAMILY.layouts(FAMILY.parts(step), config)
        assert made == {"x0": config["source_layout"], step.nodes[-1].name: config["layout"]}


REFUSED = {
    "another op": (lambda b: b("relu", b.x(2, 3)), "only a cast alone"),
    "two ops": (lambda b: b("relu", b("cast", b.x(2, 3), dtype="float32")), "only a cast alone"),
    "doubles": (cast((2, 3), "float64", "float32"), "got float64"),
    "counters": (cast((2, 3), "int64", "float32"), "got int64"),
    "to doubles": (cast((2, 3), "float32", "float64"), "got float64"),
    "nothing": (cast((0, 3), "float32", "float16"), "nothing to cast"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_run_is_refused_with_the_reason(step_of, name):
    emit, reason = REFUSED[name]
    assert reason in FAMILY.why_not_step(step_of(emit, "float16"))


def test_weights_stay_in_rows(step_of):
    step = step_of(lambda b: b("cast", b.w(8, 8, 3, 3), dtype="float32"), "float16")
    assert configs(step) == [Attrs(source_layout="nchw", layout="nchw")]
    assert FAMILY.layouts(FAMILY.parts(step), configs(step)[0]) == {}


@pytest.mark.parametrize(("arch_name", "name"), in_turns(list(SHAPES)))
def test_it_builds_within_its_limits(step_of, build_within_limits, arch_name, name):
    pairs = PAIRS if arch_name == "sm90" else PAIRS[:3:2]
    for source, result in pairs:
        step = step_of(cast(SHAPES[name], source, result), "float16")
        for config in configs(step):
            usage = build_within_limits(FAMILY, step, config, load_arch(arch_name))
            assert set(usage) == {"run", "run_unaligned"}


def test_it_is_as_quick_as_the_bytes_that_it_moves(step_of):
    """Of large images no layout makes a difference; one launch less does."""
    step, arch = step_of(cast((8, 64, 56, 56), "float32", "float16"), "float16"), load_arch("sm90")
    times = {FAMILY.estimate_us(FAMILY.parts(step), config, arch) for config in configs(step)}
    assert len(times) == 1


@pytest.mark.gpu
class TestOnTheGpu:
    @pytest.mark.parametrize("name", SHAPES)
    @pytest.mark.parametrize(("source", "result"), PAIRS)
    def test_every_number_is_rounded_once(self, step_of, gpu_space, name, source, result):
        step = step_of(cast(SHAPES[name], source, result), "float16")
        x = 10 ** (8 * torch.rand(SHAPES[name], device="cuda") - 6) * 300
        x = x.to(getattr(torch, source))
        if x.is_floating_point():
            flat = x.view(-1)
            for at, value in enumerate((float("inf"), float("-inf"), float("nan"), 0.0)):
                flat[at % flat.numel()] = value
        for config in configs(step):
            trial = Trial(resolve(step, Candidate("cast", config)), gpu_space.arch)
            trial.put_data({"x0": x})
            (got,) = trial.run("run", NUMBERS).values()
            exact = x.to(getattr(torch, result)).to(got)
            torch.testing.assert_close(got, exact, rtol=0, atol=0, equal_nan=True)
