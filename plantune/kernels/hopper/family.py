"""What the families on tensor copies and warpgroup products share: legality, sizes, cost."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch

from plantune.kernels.cuda.cuda_family import Arch, Attrs, CudaFamily, P, Step
from plantune.kernels.hopper.design import Design
from plantune.kernels.hopper.launch import images_read, placing_bytes
from plantune.kernels.hopper.products import ELEMENTS
from plantune.kernels.hopper.tiles import CHUNK, ConvShape, conv_shape, reused_box
from plantune.kernels.patterns.epilogue import ConvEpilogue, ConvParts, channel_parts
from plantune.kernels.patterns.other_step import filter_arrangement
from plantune.kernels.weights.constants import Arrangement, Order

# The table of an arch's costs that all families of warpgroups read.
COSTS = "warpgroups"


class WarpgroupFamily(CudaFamily[P]):
    """A family whose kernels multiply by warpgroups, each after a design of its step and config."""

    image_layout = "nhwc"

    @abstractmethod
    def design(self, parts: P, config: Attrs) -> Any:
        """The sizes of the kernel, `threads` and `shared_bytes` among them; raises IllegalCandidate
        if there are none.
        """

    def why_not_arch(self, arch: Arch) -> str | None:
        if arch.cuda is not None and "wgmma" not in arch.cuda.features:
            return f"{arch.name} has no warpgroup products (wgmma)"
        return super().why_not_arch(arch)

    def threads(self, parts: P, config: Attrs) -> int:
        return int(self.design(parts, config).threads)

    def shared_bytes(self, parts: P, config: Attrs, arch: Arch) -> int:
        return int(self.design(parts, config).shared_bytes)


@dataclass(frozen=True)
class WarpgroupParts(ConvParts):
    """A convolution that warpgroups can multiply."""

    @cached_property
    def shape(self) -> ConvShape:
        return conv_shape(self.step, self.epilogue)


def filter_and_scalars(
    step: Step, epilogue: ConvEpilogue, w: str = "w", prefix: str = ""
) -> dict[str, tuple[str, Arrangement]]:
    """What a convolution reads of weights, as `HopperLaunch` asks for it."""
    weight = epilogue.conv.inputs[1]
    scalars = channel_parts(step, epilogue, prefix)
    return {w: (weight, filter_arrangement(step, weight)), **scalars}


def constants_of(parts: WarpgroupParts, design: Design) -> dict[str, tuple[str, Arrangement]]:
    """The same as the design's kernel reads it: filters in the order and dtype of its factors."""
    elements, own = design.elements, getattr(torch, design.elements.x)
    read = filter_and_scalars(parts.step, parts.epilogue)
    weight, filters = read.pop("w")
    if design.reversed and not design.transposed:
        o, r, s, c = filters.shape
        filters = replace(filters, shape=(c, r, s, o), order=_along_results(filters.order))
    factor = getattr(torch, elements.factor)
    several = elements.planes if elements.planes > 1 else 0
    filters = replace(filters, dtype=factor, planes=several)
    # A kernel reads scalars of x's dtype, and floats.
    scalars = {
        word: (name, how if how.also == own else replace(how, also=torch.float32))
        for word, (name, how) in read.items()
    }
    return {"w": (weight, filters), **scalars}


def _along_results(order: Order) -> Order:
    """(C, R, S, O) of what is (O, R, S, C)."""
    return lambda weight: order(weight).permute(3, 1, 2, 0)


H = TypeVar("H", bound=WarpgroupParts)


class ConvFamily(WarpgroupFamily[H]):
    """A family of convolutions whose design says what their blocks add (`sums`)."""

    reads_channels_last: ClassVar = True

    def workspace_bytes(self, parts: H, config: Attrs) -> int:
        sums = self.design(parts, config).sums(parts.epilogue.sums)
        return placing_bytes(parts) + int(sums.part_bytes)

    def copied(self, parts: H) -> frozenset[str]:
        return frozenset(images_read(parts))

    def rest(self, parts: H, config: Attrs) -> frozenset[str]:
        return frozenset(added.name for added in parts.epilogue.sums)


class HopperFamily(ConvFamily[H]):
    """A family whose kernels are a convolution of some design, with more or less around it."""

    @abstractmethod
    def design(self, parts: H, config: Attrs) -> Design:
        """The sizes of the kernel; raises IllegalCandidate if there are none."""

    def why_not_config(self, parts: H, config: Attrs, arch: Arch) -> str | None:
        return self.design(parts, config).why_not() or super().why_not_config(parts, config, arch)


def not_a_warpgroups(
    step: Step, epilogue: ConvEpilogue, shape: ConvShape | None = None
) -> dict[str, object]:
    """The reasons that no config computes this convolution, all of one dtype, and whether they
    hold.
    """
    dtypes = {type_.dtype for _, type_ in (*step.inputs, *step.outputs)}
    return {
        **not_multiplied(epilogue.conv.types[0].dtype, ELEMENTS),
        f"operands of several dtypes: {', '.join(sorted(dtypes))}": len(dtypes) > 1,
        **not_copied(step, epilogue, shape),
    }


def not_multiplied(dtype: str, known: Collection[str]) -> dict[str, object]:
    """The reason to refuse a convolution that has another dtype, and whether it holds."""
    return {f"a warpgroup multiplies {' or '.join(known)}, got {dtype}": dtype not in known}


def not_copied(
    step: Step, epilogue: ConvEpilogue, shape: ConvShape | None = None
) -> dict[str, object]:
    """The reasons that tensor copies cannot bring what a convolution reads."""
    attrs, shape = epilogue.conv.attrs, shape or conv_shape(step, epilogue)
    return {
        "only convolutions without groups and dilation": attrs["groups"] != 1
        or attrs["dilation"] != (1, 1),
        "there is nothing to compute": min(shape.n, shape.c, shape.o) == 0,
        f"pixels of {shape.c} and {shape.o} channels do not start at 16 bytes": shape.c % 8
        or shape.o % 8,
        f"a tensor copy steps over at most 8 pixels, got stride {shape.stride}": max(shape.stride)
        > 8,
    }


def why_not_reuse(shape: ConvShape, tile_m: int) -> str | None:
    """Why taps cannot share what was loaded, or None if they can."""
    if shape.margin == (0, 0) or shape.stride != (1, 1):
        return "only the taps of a larger kernel with stride 1 read the same pixels"
    if reused_box(shape, tile_m) is None:
        return f"no box of {tile_m} pixels by 8x8 can be copied at once"
    return None


def estimate_us(design: Design, traffic_bytes: float, arch: Arch) -> float:
    """Rounds of blocks over the chip, each step bound by products or by what it loads.

    What does not fit the cache moves meanwhile where other blocks of an SM go on, else on top.
    Fitted to 196 times of convolutions of three networks, deviation 14 % (H200, 2026-11-20).
    """
    assert arch.chip is not None
    cost, sms = arch.cost(COSTS), arch.chip.multiprocessors
    share = 1 / design.usual_taps if design.reuse else 1.0
    loaded = design.image_bytes * share + design.filter_bytes
    # Products of 64 columns read shared memory as fast as it goes, beside the copies.
    slower = 1.35 if design.tile_n == 64 else 1.1
    slower *= design.elements.rate
    products = design.tile_m / CHUNK * design.tile_n * 2 * slower / cost["sm_cycles_per_us"]
    step_us = max(loaded / cost["sm_bytes_per_us"], products)
    ends_us = 1.8 + design.tile_m * design.own * 2e-5 + 0.5 / design.stages
    if design.split_k > 1:
        ends_us += 0.35 * design.split_k
    filled = sms if design.split_k <= 2 else int(cost["sms_by_large_clusters"])
    waves = -(-design.blocks // filled)
    busy_us = waves * design.usual_steps * step_us + -(-waves // design.resident) * ends_us
    moving_us = max(traffic_bytes - cost["cached_bytes"], 0) / cost["bytes_per_us"]
    # Of floats so much moves that blocks that stay were seen to hide it.
    hides = design.persistent and design.elements.x == "float32"
    if (design.resident == 1 and not hides) or waves == 1:
        return busy_us + moving_us
    return max(busy_us, moving_us)
