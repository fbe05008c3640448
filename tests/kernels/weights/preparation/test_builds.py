"""The kernel that fills constants builds for every arch, and fits its chips."""

from __future__ import annotations

import ctypes

import pytest

from plantune.devices.cuda.build import compile_cuda
from plantune.graph.ops import OPS
from plantune.kernels.patterns.derived import derived_values
from plantune.kernels.patterns.pointwise_chain import cxx_of
from plantune.kernels.weights.jobs import THREADS, TURNED, Job
from plantune.kernels.weights.preparation import (
    FEW_JOBS,
    MANY_FROM_CHIP,
    MANY_JOBS,
    SOME_JOBS,
    source,
)
from plantune.plans.workload import Workload
from plantune.space.arch import ARCH_NAMES, load_arch

ARCHS = [name for name in ARCH_NAMES if name not in ("cpu", "sm86", "sm89")]
NUMBERS = {"alpha": "0.5f", "beta": "-2.0f", "eps": "1e-05f", "step": "0.01f", "least": "1e-30f"}
EVERY_OP = tuple(
    ((f"const float v0 = {text.format('in[0]', 'in[1]', 'in[1]', **NUMBERS)};",), "v0")
    for text in filter(None, map(cxx_of, OPS))
)


def in_turns():
    """Each arch with one number of jobs, and all of them for one: the code is the same for all.
    What the assembler makes for sm86 and sm89 is within two registers what it makes for sm80; sm120
    has the code of sm100 and is left to the slow tests.
    """
    every = (FEW_JOBS, SOME_JOBS, MANY_JOBS)
    taken = {(name, every[at % len(every)]) for at, name in enumerate(ARCHS)}
    return [
        pytest.param(name, jobs, marks=[pytest.mark.slow] if name == "sm120" else [])
        for name, jobs in sorted(taken | {("sm90", jobs) for jobs in every})
    ]


@pytest.mark.parametrize(("name", "jobs"), in_turns())
def test_it_builds_within_the_limits(name, jobs):
    arch = load_arch(name)
    assert arch.cuda is not None
    assert arch.cuda.compute_capability >= MANY_FROM_CHIP
    (used,) = compile_cuda(source(EVERY_OP, jobs), arch).usage.values()
    # A table that is indexed must not be copied to the stack. For two chips the assembler spills a
    # few words, to have more blocks on a multiprocessor.
    most = 24 if name in ("sm70", "sm100") else 0
    assert max(used.spill_bytes, used.stack_bytes) <= most
    assert 0 < used.registers <= 64
    assert used.registers * THREADS <= arch.cuda.registers_per_sm
    assert used.shared_bytes == 2 * TURNED + ctypes.sizeof(Job)


def test_a_network_of_batch_norms_has_few_expressions():
    graph = Workload("resnet18", 8, 3, "infer", "float16", "sm90").graph
    expressions = {each.expression for each in derived_values(graph).values()}
    assert 1 < len(expressions) < 8
    compile_cuda(source(tuple(expressions), FEW_JOBS), load_arch("sm90"))
