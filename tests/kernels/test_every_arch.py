"""Every family of CUDA kernels builds for every arch that lists it, and fits that arch's chips.

Families, archs and steps are found, not listed: a new family is in this test as soon as it exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plantune.cuda.choice import nvrtc_for
from plantune.errors import BuildError
from plantune.gpus import later_gpu
from plantune.graph.differentiate import differentiate
from plantune.graph.extract import extract
from plantune.graph.fusions import all_fusions
from plantune.graph.graph import Graph
from plantune.graph.partition import alternatives
from plantune.graph.step import Step
from plantune.graph.types import TensorType
from plantune.kernels.cuda_family import CudaFamily, block_shared_bytes, why_not_portable
from plantune.kernels.family import Candidate
from plantune.kernels.registry import all_families, candidates, estimate_us
from plantune.layers import EpisodicGRU, EpisodicLSTM
from plantune.measure.numerics import check
from plantune.models.gru_translator import Sizes, gru_translator
from plantune.space.arch import ARCH_NAMES, Arch
from plantune.space.search_space import SearchSpace, load_search_space
from plantune.workload import Workload

CUDA_ARCHS = [name for name in ARCH_NAMES if name != "cpu"]
MEASURED = "sm90"
FAMILIES = {
    name: family for name, family in all_families().items() if isinstance(family, CudaFamily)
}
SPACES = {arch: load_search_space(arch) for arch in CUDA_ARCHS}
BUILDS = [
    (family, arch) for arch in CUDA_ARCHS for family in FAMILIES if family in SPACES[arch].families
]


class Mobile(nn.Module):
    """Layers of other people's networks, for which the registered ones have no step."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Conv2d(64, 64, 5, padding=2, groups=64, bias=False)
        self.norm = nn.BatchNorm2d(64)
        self.groups = nn.Conv2d(64, 64, 3, padding=1, groups=8)
        self.of_groups, self.of_rows = nn.GroupNorm(8, 64), nn.LayerNorm(14)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.groups(F.silu(self.norm(self.each(x)))))
        joined = torch.cat((self.of_rows(F.relu(self.of_groups(y) + x)), y), 1).relu()
        return (joined * 0.5).softmax(-1)


def mobile() -> Graph:
    return extract(Mobile().half().eval(), TensorType((8, 64, 14, 14), "float16"))


def trained_rows() -> Graph:
    module = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.GroupNorm(8, 96)).half()
    return differentiate(extract(module, TensorType((512, 64), "float16")))


class Heads(nn.Module):
    """Of windows of an image."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        windows = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return windows.view(2, 2, 2, 2, 49, 32).permute(0, 2, 1, 3, 4, 5).reshape(4, 4, 49, 32) + v


def heads() -> Graph:
    return extract(Heads(), *[TensorType((4, 4, 49, 32), "float16")] * 3)


def translator() -> Graph:
    sizes = Sizes(source_words=40, target_words=900, embedding=128, hidden=256)
    return extract(gru_translator(sizes).eval(), TensorType((5, 2), "int64"))


class Remembering(nn.Module):
    """Recurrent layers that kernels of whole sequences can run."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.long = EpisodicGRU(8, 128), EpisodicLSTM(128, 128)

    def forward(self, x: Tensor, state: Tensor, done: Tensor) -> Tensor:
        made, _ = self.short(x, state, done)
        return self.long(made, (state, state), done)[0]


def recurrent() -> Graph:
    module = Remembering().half()
    inputs = ((3, 5, 8), "float16"), ((1, 5, 128), "float16"), ((3, 5), "bool")
    return differentiate(extract(module, *(TensorType(*type_) for type_ in inputs)))


def registered(*named: str | int) -> Callable[[], Graph]:
    return lambda: Workload(*named, "float16").graph


# Where a step for each family is looked for, in this order.
PROBLEMS = (
    registered("se_resnet9_fixup", 128, 3, "infer"),
    registered("se_resnet9_fixup", 128, 3, "train"),
    registered("resnet18", 8, 3, "infer"),
    mobile,
    translator,
    trained_rows,
    heads,
    recurrent,
    registered("resnet18", 8, 3, "train"),
)


@cache
def steps_of(problem: Callable[[], Graph]) -> tuple[Step, ...]:
    return alternatives(problem(), tuple(all_fusions()))


@cache
def representative(family: str) -> Step | None:
    """The step of the most ops, and of these with the most arithmetic, that a family can run."""
    for problem in PROBLEMS:
        fits = [s for s in steps_of(problem) if FAMILIES[family].why_not_step(s) is None]
        if fits:
            return max(fits, key=lambda step: (len(step.nodes), step.flops))
    return None


def configs(family: str, step: Step, space: SearchSpace) -> Iterator[Candidate]:
    """The one that a guess likes best. Of convolutions the one of the most shared memory counts as
    well: both for the arch that is measured, for others, which share their code, one in turn.
    """
    legal = [c for c in candidates(step, space) if c.family == family]
    assert legal, f"no config of {family} is legal for {step.name} on {space.arch.name}"
    first = min(legal, key=lambda c: estimate_us(step, c, space.arch))
    is_second = CUDA_ARCHS.index(space.arch.name) % 2 == 1
    if "conv" not in family or not is_second or space.arch.name == MEASURED:
        yield first
    if "conv" in family and (is_second or space.arch.name == MEASURED):
        most = max(
            legal,
            key=lambda c: FAMILIES[family].shared_bytes(
                FAMILIES[family].parts(step), c.config, space.arch
            ),
        )
        yield most


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_step_and_an_arch(family: str) -> None:
    assert representative(family) is not None, "add a problem that has a step for it"
    assert any(family in space.families for space in SPACES.values())


@pytest.mark.parametrize("arch", CUDA_ARCHS)
def test_every_family_that_an_arch_lists_is_there(arch: str) -> None:
    unknown = set(SPACES[arch].families) - set(all_families())
    assert not unknown


@pytest.mark.parametrize(("family", "arch_name"), BUILDS)
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
