"""For each family of CUDA kernels a step, and for each arch the configs in which it is built.

Families, archs and steps are found, not listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plantune.graph.fusions import all_fusions
from plantune.graph.graph import Graph
from plantune.graph.partition import alternatives
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.step import Step
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.kernels.cuda.cuda_family import CudaFamily
from plantune.kernels.family import Candidate
from plantune.kernels.registry import all_families, candidates, estimate_us
from plantune.layers import EpisodicGRU, EpisodicLSTM
from plantune.models.gru_translator import Sizes, gru_translator
from plantune.plans.workload import Workload
from plantune.space.arch import ARCH_NAMES
from plantune.space.search_space import SearchSpace, load_search_space

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


class Residual(nn.Module):
    """With the activations before the convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(32, 32, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x.relu()).relu())


def residual() -> Graph:
    return extract(Residual().half().eval(), TensorType((8, 32, 16, 16), "float16"))


def trained_floats() -> Graph:
    """Convolutions of float32."""
    module = nn.Sequential(*(nn.Conv2d(64, 64, 3, padding=1) for _ in range(2)))
    return differentiate(extract(module, TensorType((8, 64, 8, 8))))


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
    residual,
    translator,
    trained_rows,
    trained_floats,
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


def sources(arch_name: str) -> Iterator[tuple[str, str]]:
    """Each family that an arch lists, with what is compiled of it."""
    space = SPACES[arch_name]
    for name, family in FAMILIES.items():
        step = representative(name) if name in space.families else None
        for candidate in configs(name, step, space) if step else ():
            source = family.source(family.parts(step), candidate.config, space.arch)
            assert source is not None
            yield name, source
