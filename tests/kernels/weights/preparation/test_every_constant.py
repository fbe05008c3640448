"""What every family of CUDA kernels reads of weights, filled by the kernel as by torch.

Families, steps and configs are found, not listed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from plantune.devices.cuda import driver
from plantune.graph.fusions import all_fusions
from plantune.graph.partition import alternatives
from plantune.graph.step import Step
from plantune.kernels.cuda.cuda_family import CudaFamily
from plantune.kernels.cutlass import implicit_gemm
from plantune.kernels.family import Binding, Candidate, Frame
from plantune.kernels.registry import all_families, candidates, family_named
from plantune.plans.workload import Workload
from plantune.space.search_space import load_search_space

SPACE = load_search_space("sm90")
FAMILIES = [
    name
    for name, family in all_families().items()
    if isinstance(family, CudaFamily) and name in SPACE.families
]
PROBLEMS = (
    Workload("se_resnet9_fixup", 2, 3, "infer", "float16"),
    Workload("resnet18", 2, 3, "infer", "float16"),
    Workload("se_resnet9_fixup", 2, 3, "train", "float16"),
)
STEPS, CONFIGS = 3, 2  # of each family


@cache
def steps_of(problem: Workload) -> tuple[Step, ...]:
    return alternatives(problem.graph, tuple(all_fusions()))


@cache
def cases_of(family: str) -> tuple[tuple[Step, Candidate], ...]:
    """A few steps with as few of their configs, the smaller steps rather."""
    found = []
    for problem in PROBLEMS:
        fits = [
            step
            for step in steps_of(problem)
            if step.constants and family_named(family).why_not_step(step) is None
        ]
        different = {(step.ops, len(step.types)): step for step in reversed(fits)}
        for step in list(different.values())[:STEPS]:
            legal = [c for c in candidates(step, SPACE, [family]) if c.family == family]
            found += [(step, c) for c in random.Random(0).sample(legal, min(len(legal), CONFIGS))]
    return tuple(found)


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plantune.devices.cuda.kernel._module", lambda binary: None)
    monkeypatch.setattr(driver, "function_of", lambda module, name: SimpleNamespace(value=1))
    monkeypatch.setattr(driver, "attribute", lambda function, which: 90)
    # It asks a kernel of its own for its sizes.
    monkeypatch.setattr(implicit_gemm, "_launching", lambda *arguments: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


def drawn(step: Step, layout: str, seed: int) -> dict[str, Tensor]:
    """Random constants with one of some kinds of strides, and memory for all else."""
    random_ = torch.Generator().manual_seed(seed)
    values = {}
    for name, type_ in (*step.inputs, *step.outputs):
        shape, dtype = type_.shape, type_.torch_dtype
        if name not in step.constants:
            values[name] = torch.empty(shape, dtype=dtype)
        elif layout == "odd":  # every second element, from an odd place on
            whole = torch.randn(*shape, 2, generator=random_).to(dtype)
            values[name] = whole[..., 1]
        else:
            values[name] = torch.randn(shape, generator=random_).to(dtype)
            if layout == "channels_last" and len(shape) == 4:
                values[name] = values[name].contiguous(memory_format=torch.channels_last)
    return values


def bound(step: Step, candidate: Candidate, values: dict[str, Tensor]) -> Binding:
    family = family_named(candidate.family)
    size = family.workspace_bytes(family.parts(step), candidate.config)
    workspace = torch.empty(size + 256, dtype=torch.uint8)
    frame = Frame(values, workspace[-workspace.data_ptr() % 256 :], built=object())
    return family.bind(family.parts(step), candidate.config, frame)


def constants_of(family: str, layout: str) -> Iterator[tuple[Step, Binding, dict[str, Tensor]]]:
    for seed, (step, candidate) in enumerate(cases_of(family)):
        values = drawn(step, layout, seed)
        yield step, bound(step, candidate, values), values


@pytest.mark.parametrize("layout", ["nchw", "channels_last", "odd"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernel_fills_what_torch_fills(emulated, family, layout):
    for _, binding, values in constants_of(family, layout):
        preparation = emulated(binding.constants, values)
        preparation.fill()
        assert preparation.by_torch == sum(c.by_torch for c in binding.constants)
        for constant in binding.constants:
            made = constant.tensor.clone()
            if not constant.is_in_place():
                constant.fill()
            assert torch.equal(made, constant.tensor), (family, constant.name)
            assert not made.isnan().any()


@pytest.mark.parametrize("family", FAMILIES)
def test_no_layout_of_a_weight_is_demanded(family):
    """A conversion is made once: a pass would read what a weight was."""
    for step, candidate in cases_of(family):
        demanded = family_named(family).layouts(family_named(family).parts(step), candidate.config)
        assert not step.constants & demanded.keys()


def test_filters_in_channels_last_are_read_in_place():
    """Those in the order of a kernel's own are packed in either."""
    read: set[str] = set()
    for family in FAMILIES:
        for step, binding, _ in constants_of(family, "channels_last"):
            filters = {name for name in step.constants if len(step.types[name].shape) == 4}
            if any(c.is_in_place() and c.name in filters for c in binding.constants):
                read.add(family)
    assert read >= {"hopper_conv", "hopper_block", "resident_conv"}
    assert read >= {"implicit_gemm_conv"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_says_whether_it_reads_filters_in_channels_last_only(family):
    """As `explain` tells what NCHW filters cost."""

    def in_place(layout: str) -> set[tuple[int, str]]:
        return {
            (case, constant.name)
            for case, (step, binding, _) in enumerate(constants_of(family, layout))
            for constant in binding.constants
            if constant.is_in_place()
            and min(step.types[constant.name].shape[1:], default=1) > 1
            and len(step.types[constant.name].shape) == 4
        }

    only = in_place("channels_last") - in_place("nchw")
    assert bool(only) == family_named(family).reads_channels_last


def test_every_constant_that_a_family_keeps_is_named():
    """What no constant covers is read at its own address in each launch."""
    for family in FAMILIES:
        for step, binding, _ in constants_of(family, "nchw"):
            named = {name for constant in binding.constants for name in constant.reads}
            assert named <= step.constants, family
            if family in ("hopper_conv", "resident_conv", "first_conv", "stem", "pool_conv"):
                assert named == step.constants
