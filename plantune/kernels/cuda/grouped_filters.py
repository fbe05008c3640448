"""Filters of few channels, in groups or not, as warps' products read them: `grouped_conv.h`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from plantune.graph import Step
from plantune.kernels.patterns.other_step import filter_arrangement
from plantune.kernels.weights.constants import Arrangement

UNIT = 8  # channels that one product reads of a pixel, and that it makes
SLAB = 64  # channels of a block, at least if there are so many: lines of 128 bytes
FEWEST = 4  # two taps of them are a unit
CHECK = """
static_assert(Kernel::kSharedBytes == {}, "the launch asks for what the kernel uses");"""


@dataclass(frozen=True)
class Groups:
    """How channels are divided: `merged` groups of the network are one of the kernel's, whose
    products with each other are zero.
    """

    count: int
    inputs: int
    outputs: int
    merged: int

    @staticmethod
    def of(count: int, inputs: int, outputs: int) -> Groups:
        """Groups of so many channels each."""
        merged = UNIT // math.gcd(inputs, UNIT) if inputs < UNIT else 1
        merged = merged if count % merged == 0 else 1
        return Groups(count // merged, inputs * merged, outputs * merged, merged)

    @property
    def slab(self) -> int:
        """Groups of a block, such that all blocks have about as many."""
        blocks = -(-self.count * max(self.inputs, self.outputs) // SLAB)
        return -(-self.count // min(blocks, self.count))


def packed_filters(step: Step, name: str, groups: Groups, by_twos: bool = False) -> Arrangement:
    """The filters of a convolution as the products read them, taps of few channels `by_twos`."""
    filters, type_ = filter_arrangement(step, name), step.types[name]
    rows, columns = type_.shape[2:]
    units = rows * -(-columns // 2) if by_twos else rows * columns * groups.inputs // UNIT
    shape = (groups.count, groups.outputs // UNIT, -(-units // 2), UNIT, 4, 2, 2)

    def packed(weight: Tensor) -> Tensor:
        ordered = filters.order(weight)
        if by_twos:
            whole = pad(ordered, (0, FEWEST - ordered.shape[3], 0, columns % 2))
            ordered = whole.reshape(len(whole), rows, -1, UNIT)
        return _by_lanes(ordered.permute(0, 3, 1, 2), groups, shape)

    return Arrangement(shape, type_.torch_dtype, packed, packs=True)


def _by_lanes(weight: Tensor, groups: Groups, shape: tuple[int, ...]) -> Tensor:
    """Lane 4 * o + t of a product brings values 2 * t and 2 * t + 1 of output o, of both units."""
    merged, taps = groups.merged, weight.shape[2] * weight.shape[3]
    outputs, inputs = groups.outputs // merged, groups.inputs // merged
    split = weight.reshape(groups.count, merged, outputs, 1, inputs, taps)
    own = torch.eye(merged, dtype=torch.bool, device=weight.device).view(merged, 1, merged, 1, 1)
    whole = torch.where(own, split, torch.zeros_like(split))
    whole = whole.reshape(groups.count, groups.outputs, groups.inputs, taps)
    units = whole.transpose(2, 3).reshape(groups.count, groups.outputs, -1, UNIT)
    units = pad(units, (0, 0, 0, units.shape[2] % 2))
    count, tiles, steps, *_ = shape
    parts = units.view(count, tiles, UNIT, steps, 2, 4, 2)
    return parts.permute(0, 1, 3, 2, 5, 4, 6)
