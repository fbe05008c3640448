"""A kernel that cannot be launched on a chip is known before it is."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest

from plantune.base.canonical import Attrs
from plantune.devices.cuda.build import Binary
from plantune.errors import BuildError
from plantune.kernels.cuda.cuda_family import CudaFamily, why_not_fits
from plantune.kernels.family import Candidate, Parts
from plantune.kernels.registry import why_not
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

SM90, SM75 = load_arch("sm90"), load_arch("sm75")
LOG = """ptxas info    : Compiling entry function 'run' for 'sm_90a'
ptxas info    : Used {registers} registers, used 1 barriers, {shared} bytes smem
"""
SOURCE = """extern "C" __global__ void run(float* y) {{
  __shared__ float kept[{words}];
  kept[threadIdx.x] = y[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = kept[threadIdx.x ^ 1];
}}
"""


def binary(registers: int = 32, shared: int = 0) -> Binary:
    return Binary("key", b"", LOG.format(registers=registers, shared=shared))


class Greedy(CudaFamily):
    """Config: how many threads, how much dynamic and how much static shared memory."""

    name: ClassVar = "greedy"

    def read(self, step):
        return Parts(step)

    def configs(self, space):
        return (Attrs(threads=128, dynamic=0, static=1024),)

    def admits(self, config, space):
        return True

    def shared_bytes(self, parts, config, arch):
        return config["dynamic"]

    def source(self, parts, config, arch):
        return SOURCE.format(words=config["static"] // 4)

    def bind(self, parts, config, frame):
        raise AssertionError("it must not be launched")


@pytest.fixture
def step(step_of):
    return step_of(lambda b: b("relu", b.x(2, 3, 5, 7)))


def config(**changes):
    return Attrs({"threads": 128, "dynamic": 0, "static": 1024, **changes})


@pytest.mark.parametrize(
    ("registers", "threads", "fits"),
    [(255, 256, True), (128, 512, True), (129, 512, False), (255, 512, False), (64, 1024, True)],
)
def test_registers_of_a_block(registers, threads, fits):
    reason = why_not_fits(binary(registers), SM90, threads)
    assert (reason is None) == fits
    assert fits or "sm90 has no more than 65536" in reason


def test_shared_memory_of_a_block_counts_both_kinds():
    most = SM90.cuda.shared_memory_per_block_bytes
    assert why_not_fits(binary(shared=1024), SM90, 128, most - 1024) is None
    reason = why_not_fits(binary(shared=1024), SM90, 128, most - 1023)
    assert f"sm90 has no more than {most}" in reason


def test_no_chip_runs_a_block_of_so_many_threads():
    reason = why_not_fits(binary(), SM90, 1056)
    assert reason == "a block of 1056 threads, sm90 has no more than 1024"


def test_a_config_with_too_much_shared_memory_is_not_even_compiled(register, step):
    family = Greedy()
    register(greedy=family)
    space = load_search_space("sm75")
    wanted = SM75.cuda.shared_memory_per_block_bytes + 1
    reason = why_not(step, Candidate("greedy", config(dynamic=wanted)), space)
    assert f"it needs {wanted} bytes of shared memory, a block has {wanted - 1}" in reason
    assert why_not(step, Candidate("greedy", config(dynamic=wanted - 1)), space) is None


@pytest.mark.parametrize(
    "changes", [{"threads": 1056}, {"dynamic": 232448}], ids=["threads", "shared memory"]
)
def test_what_the_binary_shows_rejects_the_build(step, changes):
    with pytest.raises(BuildError, match="sm90 has no more than"):
        Greedy().build(Greedy().parts(step), config(**changes), SM90)
    assert Greedy().build(Greedy().parts(step), config(), SM90).usage["run"].shared_bytes == 1024


def test_what_counts_is_the_kernel_that_is_launched():
    """A binary may hold others."""
    log = LOG.format(registers=32, shared=0)
    other = log.replace("'run'", "'make_params'").replace("32", "255")
    both = replace(binary(), log=other + log)
    assert why_not_fits(both, SM90, 1024) is None
