"""What the tests of CUDA families share: within which limits they build, and what is right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from plantune.base.canonical import Attrs
from plantune.devices.cuda.build import Usage
from plantune.devices.cuda.choice import nvrtc_for
from plantune.devices.gpus import best_arch
from plantune.graph.step import Step
from plantune.kernels.build import build_all
from plantune.kernels.cuda.cuda_family import CudaFamily
from plantune.kernels.family import Candidate
from plantune.kernels.registry import resolve, why_not
from plantune.measure.numerics import Numerics, check
from plantune.measure.trial import NUMBERS, Trial
from plantune.space.arch import ARCH_NAMES, Arch, load_arch
from plantune.space.search_space import SearchSpace, load_search_space

from ..conftest import step_of

pytest.register_assert_rewrite(f"{__package__}.contract")
DTYPES = ("float16", "bfloat16", "float32")
# Of a kernel for sm89 the assembler makes the same as for sm86, and within two registers the same
# as for sm80 (seven families, NVRTC 13.0): these two are left to test_every_arch.py. What is built
# for sm120 is the text that is built for sm100: those tests are slow ones.
BUILT = [name for name in ARCH_NAMES if name not in ("cpu", "sm86", "sm89")]
MARKS = {"sm120": [pytest.mark.slow]}
Check = Callable[[Step, Candidate, SearchSpace], Numerics]
AssertRight = Callable[[Step, Candidate, SearchSpace], None]
# Channels and size of the images in the four blocks of se_resnet9.
BLOCKS = [(64, 16), (128, 8), (256, 4), (512, 2)]
# Channels, size, outputs and stride of its 3x3 convolutions.
LAYERS = [
    (64, 16, 64, 1),
    (64, 16, 128, 2),
    (128, 8, 128, 1),
    (128, 8, 256, 2),
    (256, 4, 256, 1),
    (256, 4, 512, 2),
    (512, 2, 512, 1),
]


@pytest.hookimpl(trylast=True)  # so that a test's own parameters come first in its id
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `cuda_arch` runs for each arch of CUDA, one that asks for `built_arch`
    for those of `BUILT`.
    """
    cuda = [load_arch(name) for name in ARCH_NAMES if name != "cpu"]
    built = [pytest.param(load_arch(name), marks=MARKS.get(name, [])) for name in BUILT]
    for fixture, archs, names in (
        ("cuda_arch", cuda, [arch.name for arch in cuda]),
        ("built_arch", built, BUILT),
    ):
        if fixture in metafunc.fixturenames:
            metafunc.parametrize(fixture, archs, ids=names)


def in_turns(values: Sequence[object]) -> list[object]:
    """For `parametrize` with the name of an arch and one of these values: each arch that is built
    for with one of them, in turn, and the one that is measured with all.
    """
    own = [(name, at % len(values)) for at, name in enumerate(BUILT)]
    every = {*own, *(("sm90", at) for at in range(len(values)))}
    return [
        pytest.param(name, values[at], id=f"{name}-{values[at]}", marks=MARKS.get(name, []))
        for name, at in sorted(every)
    ]


def legal(family: CudaFamily, step: Step, arch: str = "sm90") -> list[Candidate]:
    """The candidates of a family that may run a step, whether or not the arch's file has it."""
    space = load_search_space(arch)
    made = (Candidate(family.name, config) for config in family.configs(space))
    return [candidate for candidate in made if why_not(step, candidate, space) is None]


def epilogue(b: Any, y: str, parts: Sequence[str], channels: int) -> str:
    """What follows a convolution: values of channels, a residual, an offset, functions."""
    for part in parts:
        if part in ("mul_channel", "add_channel"):
            y = b(part, y, b.w(channels), axis=1)
        elif part == "residual":
            y = b("add", y, b.x(*b.graph.types[y].shape))
        else:
            y = b("add", y, b.w(1)) if part == "offset" else b(part, y)
    return y


def assert_digits_kept(
    step: Step, candidate: Candidate, space: SearchSpace, exact: Callable[[Tensor], Tensor]
) -> None:
    """That a norm of numbers far from zero is as exact as the floats beside their mean."""
    trial = Trial(resolve(step, candidate), space.arch)
    x = torch.randn(step.inputs[0][1].shape, device="cuda") + 1e4
    trial.put_data({"x0": x})
    got = trial.run("run", NUMBERS)[step.outputs[0][0]]
    # Half of the distance between floats near the mean is 5e-4.
    assert (got - exact(x.double())).abs().max() < 5e-3


def spills_for_a_block(used: Usage, threads: int, arch: Arch) -> bool:
    """Whether the assembler may have spilled so that one more block fits on a multiprocessor.

    That of NVRTC 13.2, beside torch 2.15, does so for sm100, where that of 13.0 does not: a batch
    norm has 64 registers and spills one word so that two blocks fit, a concatenation 48 and two
    words for a fifth block. Told by `__launch_bounds__` that one block is enough, it takes 94 and
    56 and spills nothing. Which is faster is unknown: we had no such GPU.
    """
    if arch.name != "sm100" or nvrtc_for(arch).version < (13, 2):
        return False
    per_block = [threads * registers for registers in (used.registers, used.registers + 8)]
    spilled, whole = (arch.gpu.registers_per_sm // registers for registers in per_block)
    return spilled > whole


@pytest.fixture
def build_within_limits() -> Callable[..., Mapping[str, Usage]]:
    """Builds a config; its kernels spill nothing and fit into an SM. What they take is returned."""

    def build(family: CudaFamily, step: Step, config: Attrs, arch: Arch) -> Mapping[str, Usage]:
        binary, threads = (
            family.build(family.parts(step), config, arch),
            family.threads(family.parts(step), config),
        )
        assert arch.cuda is not None
        for name, used in binary.usage.items():
            most = 8 if spills_for_a_block(used, threads, arch) else 0
            assert max(used.spill_bytes, used.stack_bytes) <= most, name
            assert 0 < used.registers <= arch.cuda.registers_per_thread_max, name
            assert used.registers * threads <= arch.cuda.registers_per_sm, name
        # The assembler says so where it has to wait for each product of a warpgroup.
        assert "serialized" not in binary.log
        return binary.usage

    return build


@pytest.fixture
def gpu_space() -> SearchSpace:
    """The search space of the GPU that is here."""
    return load_search_space(best_arch())


@pytest.fixture
def checked() -> Check:
    """Runs a candidate; tests with a bound of their own define this fixture anew."""
    return check


@pytest.fixture
def assert_right(checked: Check) -> AssertRight:
    """That a candidate is legal, keeps its bound and makes the same of the same data."""

    def run(step: Step, candidate: Candidate, space: SearchSpace) -> None:
        found = checked(step, candidate, space)
        assert found.error <= found.bound
        assert found.deterministic

    return run


@pytest.fixture
def assert_legal_configs_right(
    assert_right: AssertRight, gpu_space: SearchSpace
) -> Callable[..., None]:
    """That on the GPU that is here every legal config is right, of those given or of all."""

    def run(family: CudaFamily, step: Step, configs: Iterable[Attrs] | None = None) -> None:
        given = family.configs(gpu_space) if configs is None else configs
        wanted = [Candidate(family.name, config) for config in given]
        wanted = [each for each in wanted if why_not(step, each, gpu_space) is None]
        build_all([resolve(step, candidate) for candidate in wanted], gpu_space.arch)
        for candidate in wanted:
            assert_right(step, candidate, gpu_space)

    return run


@pytest.fixture(scope="session")
def known_shares() -> dict[Any, Any]:
    return {}


@pytest.fixture
def assert_case_right(
    assert_legal_configs_right: Callable[..., None],
    gpu_space: SearchSpace,
    known_shares: dict[Any, Any],
) -> Callable[..., None]:
    """That a case of a table is right in few configs; all of its cases run every one."""
    from .cases import shares_of

    def run(
        family: CudaFamily,
        table: Mapping[Any, Any],
        name: Any,
        dtype: str,
        dtypes: Sequence[str] = DTYPES,
        make: Callable[[Any, str], Step] = step_of,
    ) -> None:
        key = (family.name, *table)
        if key not in known_shares:
            known_shares[key] = shares_of(family, table, gpu_space.arch.name, dtypes, make)
        step = make(table[name], dtype)
        assert_legal_configs_right(family, step, known_shares[key][name, dtype])

    return run
