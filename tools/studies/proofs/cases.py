"""The case of a seed: a module, how it is called, and the plans of the framework's own kernels."""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

import torch
from blocks import KINDS
from torch import Tensor, nn

from plantune.devices.cuda.flags import flags
from plantune.devices.machine import arch_of
from plantune.graph import Graph
from plantune.kernels.torch_ops import may_misread_pixels
from plantune.plans.guess import CHANNELS_LAST, compose, hand_plan
from plantune.plans.plan import Plan
from plantune.runtime.load import optimize
from plantune.search.sought import Sought
from plantune.space.search_space import SearchSpace, load_search_space
from plantune.tuning import sought_for

# `moving` is training mode without gradients, `eval` gradients with statistics that stand still.
MODES = ("infer", "moving", "train", "train", "eval")
DTYPES = {
    "cpu": ("float32",) * 5 + ("bfloat16",) * 3 + ("float16",) * 2 + ("float64",),
    "cuda": ("float32",) * 3 + ("bfloat16",) * 3 + ("float16",) * 3,
}
PLANS = ("nchw", "nhwc")


@dataclass(frozen=True)
class Asked:
    """What the seeds are drawn for; `kinds` and the others narrow what is drawn."""

    device: str = "cpu"
    kinds: tuple[str, ...] = tuple(KINDS)
    modes: tuple[str, ...] = MODES
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """`module` has the training flags of the mode, and lives on the device as `x` does."""

    text: str
    seed: int
    module: nn.Module
    x: Tensor
    mode: str
    tf32: bool = False

    @property
    def trains(self) -> bool:
        """Whether gradients are planned."""
        return self.mode in ("train", "eval")

    def precision(self) -> ExitStack:
        """Inside, a GPU multiplies as the case asks."""
        inside = ExitStack()
        for place in (torch.backends.cudnn.conv, torch.backends.cuda.matmul):
            inside.enter_context(flags(place, fp32_precision="tf32" if self.tf32 else "ieee"))
        return inside

    @cached_property
    def sought(self) -> Sought:
        mode = "train" if self.trains else "infer"
        return sought_for(optimize(self.module, self.x, mode=mode, fallback="silent"))[0]

    @property
    def graph(self) -> Graph:
        return self.sought.graph

    @cached_property
    def space(self) -> SearchSpace:
        return load_search_space(arch_of(self.x.device))

    @cached_property
    def layouts(self) -> tuple[str, ...]:
        """Those in which torch's kernels cannot lose a GPU."""
        types, nodes = self.graph.types, self.graph.nodes
        lost = self.x.is_cuda and any(may_misread_pixels(node, types) for node in nodes)
        return PLANS[:1] if lost else PLANS

    def plan(self, name: str) -> Plan:
        """The framework's kernels in one layout, or ours as one would pick them."""
        if name == "ours":
            return hand_plan(self.graph, self.space, network="drawn")
        preferences = CHANNELS_LAST if name == "nhwc" else ()
        return compose(self.graph, self.space, network="drawn", preferences=preferences)


def case_of(seed: int, asked: Asked = Asked()) -> Case:
    rng = random.Random(f"proof {seed}")
    kind, mode = rng.choice(asked.kinds), rng.choice(asked.modes)
    dtype = rng.choice(asked.dtypes or DTYPES[asked.device])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module, shape = KINDS[kind](rng, 2 if mode in ("moving", "train") else 1)
        x = torch.randn(max(shape[0], _least(module)), *shape[1:])
    tf32 = asked.device == "cuda" and dtype == "float32" and rng.random() < 0.5
    last = len(shape) == 4 and rng.random() < 0.5
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
        module = module.to(memory_format=torch.channels_last) if rng.random() < 0.5 else module
    module = module.to(asked.device, getattr(torch, dtype)).train(mode in ("moving", "train"))
    sizes = "x".join(map(str, x.shape))
    told = [kind, dtype, mode, sizes, *(["channels_last"] * last), *(["tf32"] * tf32)]
    return Case(" ".join(told), seed, module, x.to(asked.device, getattr(torch, dtype)), mode, tf32)


def _least(module: nn.Module) -> int:
    """How many images torch asks for where a group norm has one channel in a group."""
    norms = [part for part in module.modules() if isinstance(part, nn.GroupNorm)]
    return 2 if any(norm.num_groups == norm.num_channels for norm in norms) else 1
