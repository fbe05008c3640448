"""What the families on tensor copies and warpgroup products share: legality, sizes, cost."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from plantune.kernels.cuda.cuda_family import Arch, Attrs, CudaFamily, P, Step
from plantune.kernels.hopper.design import Design
from plantune.kernels.hopper.launch import images_read, placing_bytes
from plantune.kernels.hopper.products import ELEMENTS
from plantune.kernels.hopper.tiles import CHUNK, ROW_BYTES, ConvShape, conv_shape, reused_box
from plantune.kernels.patterns.epilogue import ConvEpilogue, ConvParts, channel_parts
from plantune.kernels.patterns.other_step import filter_arrangement
from plantune.kernels.weights.constants import Arrangement

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
    """What a convolution reads of weights, as `Launch` asks for it."""
    weight = epilogue.conv.inputs[1]
    scalars = channel_parts(step, epilogue, prefix)
    return {w: (weight, filter_arrangement(step, weight)), **scalars}


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
    """The reasons that no config computes this convolution, and whether they hold."""
    attrs, dtype = epilogue.conv.attrs, step.types[epilogue.conv.inputs[0]].dtype
    shape = shape or conv_shape(step, epilogue)
    return {
        f"a warpgroup multiplies float16 or bfloat16, got {dtype}": dtype not in ELEMENTS,
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
    loaded = design.image_bytes * share + design.tile_n * ROW_BYTES
    # Products of 64 columns read shared memory as fast as it goes, beside the copies.
    slower = 1.35 if design.tile_n == 64 else 1.1
    products = design.tile_m / CHUNK * design.tile_n * 2 * slower / cost["sm_cycles_per_us"]
    step_us = max(loaded / cost["sm_bytes_per_us"], products)
    ends_us = 1.8 + design.tile_m * design.own * 2e-5 + 0.5 / design.stages
    if design.split_k > 1:
        ends_us += 0.35 * design.split_k
    filled = sms if design.split_k <= 2 else int(cost["sms_by_large_clusters"])
    waves = -(-design.blocks // filled)
    busy_us = waves * design.usual_steps * step_us + -(-waves // design.resident) * ends_us
    moving_us = max(traffic_bytes - cost["cached_bytes"], 0) / cost["bytes_per_us"]
    if design.resident == 1 or waves == 1:
        return busy_us + moving_us
    return max(busy_us, moving_us)
