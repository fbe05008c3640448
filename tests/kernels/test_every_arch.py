"""Every family of CUDA kernels builds for every arch that lists it, and fits that arch's chips.

A new family is in this test as soon as it exists: see representatives.py.
"""

from __future__ import annotations

import pytest

from plantune.devices.cuda.choice import nvrtc_for
from plantune.devices.gpus import later_gpu
from plantune.errors import BuildError
from plantune.graph.step import Step
from plantune.kernels.cuda.cuda_family import CudaFamily, block_shared_bytes, why_not_portable
from plantune.kernels.family import Candidate
from plantune.kernels.registry import all_families
from plantune.measure.numerics import check
from plantune.space.arch import Arch

from .representatives import BUILDS, CUDA_ARCHS, FAMILIES, SPACES, configs, representative

# No header of ours asks for more than whether an arch is at least 7.5, 8.0 or 9.0: the two of a
# pair differ in what the assembler makes. Each family is built for one of them, in turn.
PAIRS = (("sm86", "sm89"), ("sm100", "sm120"))
# From Ampere on CUTLASS's gradients have the same instructions and pipelines: beyond the first of
# these archs they are built in slow tests.
ON_CUTLASS = ("implicit_gemm_dgrad", "implicit_gemm_wgrad")
UNLIKE = ("sm70", "sm75", "sm80")


def in_turns() -> list[object]:
    """Every family and arch; the other one of a pair is a slow test."""
    others = {
        (family, pair[at % 2]) for at, family in enumerate(sorted(FAMILIES)) for pair in PAIRS
    }
    return [
        pytest.param(family, arch, marks=[pytest.mark.slow] if is_slow else [])
        for family, arch in BUILDS
        for is_slow in [(family, arch) in others or (family in ON_CUTLASS and arch not in UNLIKE)]
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_step_and_an_arch(family: str) -> None:
    assert representative(family) is not None, "add a problem that has a step for it"
    assert any(family in space.families for space in SPACES.values())


@pytest.mark.parametrize("arch", CUDA_ARCHS)
def test_every_family_that_an_arch_lists_is_there(arch: str) -> None:
    unknown = set(SPACES[arch].families) - set(all_families())
    assert not unknown


@pytest.mark.parametrize(("family", "arch_name"), in_turns())
def test_it_builds_for_the_arch_within_its_limits(family: str, arch_name: str) -> None:
    space, step = SPACES[arch_name], representative(family)
    if FAMILIES[family].why_not_arch(space.arch) is not None:
        pytest.fail(f"{arch_name} lists {family}: {FAMILIES[family].why_not_arch(space.arch)}")
    assert step is not None
    for candidate in configs(family, step, space):
        check_fit(FAMILIES[family], step, candidate, space.arch)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "arch_name"), [b for b in BUILDS if why_not_portable(SPACES[b[1]].arch) is None]
)
def test_its_numbers_are_right_on_a_later_gpu(family: str, arch_name: str) -> None:
    space, step = SPACES[arch_name], representative(family)
    device = later_gpu(space.arch)
    if device is None:
        pytest.skip(f"no GPU here is later than {arch_name}")
    try:
        nvrtc_for(space.arch)
    except BuildError as error:
        pytest.skip(str(error))
    assert step is not None
    for candidate in configs(family, step, space):
        check(step, candidate, space, device=device)


def check_fit(family: CudaFamily, step: Step, candidate: Candidate, arch: Arch) -> None:
    """Reads what the kernels take off the binary."""
    binary, cuda = family.build(family.parts(step), candidate.config, arch), arch.cuda
    assert cuda is not None
    assert binary.image.startswith(b"\x7fELF")
    for name, used in binary.usage.items():
        assert 0 < used.registers <= cuda.registers_per_thread_max, (candidate, name)
        assert used.spill_bytes == 0, (candidate, name)
    used, threads = binary.usage["run"], family.threads(family.parts(step), candidate.config)
    shared = block_shared_bytes(used, arch) + family.shared_bytes(
        family.parts(step), candidate.config, arch
    )
    assert 32 <= threads <= cuda.threads_per_block_max
    assert threads * used.registers <= cuda.registers_per_sm
    assert shared <= cuda.shared_memory_per_block_bytes
