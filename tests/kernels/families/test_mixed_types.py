"""Families whose operands have element types of their own: what they run, build, and make of it."""

from __future__ import annotations

import pytest
import torch

from plantune.graph.contraction import contracted
from plantune.graph.step import Step
from plantune.kernels.registry import all_families, family_named, why_not
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

from ..conftest import step_of
from .conftest import MARKS, legal
from .mixed import MIXED
from .mixed_convolutions import of_floats

CASES = [(family, name) for family, table in MIXED.items() for name in table]
DTYPES = ("float16", "bfloat16")


def step_named(family: str, name: str, dtype: str = "float16") -> Step:
    return step_of(MIXED[family][name], dtype)


@pytest.mark.parametrize(("family", "name"), CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_runs_the_step(family: str, name: str, dtype: str) -> None:
    step = step_named(family, name, dtype)
    assert "cast" in step.ops
    assert family_named(family).why_not_step(step) is None
    assert legal(family_named(family), step)


def test_every_family_that_says_so_has_cases() -> None:
    mixing = {name for name, family in all_families().items() if family.mixes_types}
    assert mixing == MIXED.keys()


@pytest.mark.parametrize(("family", "name"), CASES)
def test_the_step_means_the_same_without_its_casts(family: str, name: str) -> None:
    """In float64, in which casts are nothing."""
    step = step_named(family, name)
    values = {
        name: torch.randn(type_.shape, dtype=torch.float64)
        if type_.is_float
        else torch.randint(0, 255, type_.shape, dtype=type_.torch_dtype)
        for name, type_ in step.inputs
    }
    expected, made = (each.evaluate(values, torch.float64) for each in (step, contracted(step)))
    for output, _ in step.outputs:
        torch.testing.assert_close(made[output], expected[output], rtol=0, atol=0)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_families_of_one_type_refuse_it_with_a_reason(family: str, name: str) -> None:
    step, space = step_named(family, name), load_search_space("sm90")
    for other in all_families().values():
        if other.mixes_types or other.name in ("framework", "inductor", "cast"):
            continue
        assert other.why_not_step(step), other.name
    for candidate in legal(family_named(family), step):
        assert why_not(step, candidate, space) is None


def test_an_image_of_floats_is_rounded_before_a_hopper_convolution() -> None:
    step = step_of(of_floats, "float16")
    why_not_step = family_named("hopper_conv").why_not_step(step)
    assert why_not_step == "x of float32 as factors of float16"


ARCHS = ("sm70", "sm75", "sm80", "sm90", "sm100", "sm120")
# Each case for one arch, in turn, of those that the family runs on.
BUILT = [
    pytest.param(family, name, arch, marks=MARKS.get(arch, []))
    for at, (family, name) in enumerate(CASES)
    for arch in dict.fromkeys((ARCHS[at % len(ARCHS)], "sm90"))
    if family_named(family).why_not_arch(load_arch(arch)) is None
]


@pytest.mark.parametrize(("family", "name", "arch_name"), BUILT)
def test_it_builds_within_its_limits(
    build_within_limits, family: str, name: str, arch_name: str
) -> None:
    step, arch = step_named(family, name), load_arch(arch_name)
    candidates = legal(family_named(family), step, arch_name)
    build_within_limits(family_named(family), step, candidates[0].config, arch)


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "name"), CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_right_on_the_gpu(assert_case_right, family: str, name: str, dtype: str) -> None:
    assert_case_right(family_named(family), MIXED[family], name, dtype, DTYPES)
