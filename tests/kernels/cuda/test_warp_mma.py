"""Weights against the fragments of the matrix instructions, as the PTX ISA lists them.

`csrc/cuda/warp_mma.h` says which rows, runs and channels a lane holds; its words are repeated here.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from plantune.kernels.cuda.warp_mma import why_not_elements
from plantune.space.arch import load_arch

LANES = range(32)
RunsOf = Callable[[int], list[Tensor]]


def quad(lane: int) -> int:
    return lane // 4 % 4


def place(lane: int) -> int:
    return lane % 4 + lane // 16 * 4


def row_of(lane: int) -> int:
    """Which rows' runs a lane of Volta's reads."""
    return (quad(lane) // 2 * 2 + place(lane) // 2 % 2) * 2 + place(lane) % 2


def turing_loaded(weight: Tensor) -> RunsOf:
    """The runs that `load_b` asks for."""
    return lambda lane: [
        weight[8 * (lane // 8) + lane // 4 % 2 + 2 * i, lane % 4 * 4 :][:4] for i in range(4)
    ]


def turing_gathered(weight: Tensor, half: int) -> RunsOf:
    """Those of `gather_b`: of each 8 values of a row, the first or the second half."""

    def runs(lane: int) -> list[Tensor]:
        channel = lane // 8 * 8 + lane // 4 % 2
        return [weight[channel + 2 * i, lane % 4 * 8 + 4 * half :][:4] for i in range(4)]

    return runs


def volta_loaded(weight: Tensor) -> RunsOf:
    """Of each half, four runs."""

    def runs(lane: int) -> list[Tensor]:
        channel = row_of(lane) // 2 * 8 + place(lane) // 4 * 2 + row_of(lane) % 2
        return [weight[channel + 4 * h, 4 * j :][:4] for h in (0, 1) for j in range(4)]

    return runs


def volta_gathered(weight: Tensor, half: int) -> RunsOf:
    def runs(lane: int) -> list[Tensor]:
        row = row_of(lane)
        channel = row // 2 * 8 + place(lane) // 4 * 2 + row % 2
        return [weight[channel + 4 * h, 8 * j + 4 * half :][:4] for h in (0, 1) for j in range(4)]

    return runs


def turing_tile(a: Tensor, runs_of: RunsOf) -> Tensor:
    """c (16, 32) of m16n8k16 or two m16n8k8, from a (16, 16) and the runs of each lane."""
    c = torch.zeros(16, 32)
    for j in range(4):
        left, right = torch.zeros(16, 16), torch.zeros(16, 8)
        for lane in LANES:
            group, own = lane // 4, lane % 4
            # The instruction's own place of the i-th value of a run.
            values = [2 * own, 2 * own + 1, 2 * own + 8, 2 * own + 9]
            for i in (0, 1):
                left[group + 8 * i, values] = a[group + 8 * i, 4 * own : 4 * own + 4]
            right[values, group] = runs_of(lane)[j]
        product = left @ right
        for lane in LANES:
            group, own = lane // 4, lane % 4
            for i in (0, 1):
                got = product[group + 8 * i, 2 * own : 2 * own + 2]
                c[group + 8 * i, 8 * own + 2 * j : 8 * own + 2 * j + 2] = got
    return c


def volta_tile(a: Tensor, runs_of: RunsOf) -> Tensor:
    """The same of m8n8k4: four groups of eight lanes, each with operands of its own."""
    c = torch.zeros(16, 32)
    for h in (0, 1):
        for which in range(4):
            product = torch.zeros(8, 8)
            members = [lane for lane in LANES if quad(lane) == which]
            for j in range(4):
                left, right = torch.zeros(8, 4), torch.zeros(4, 8)
                for lane in members:
                    left[place(lane)] = a[which % 2 * 8 + place(lane), 4 * j : 4 * j + 4]
                    right[:, place(lane)] = runs_of(lane)[4 * h + j]
                product += left @ right
            for lane in members:
                for i in range(8):
                    # Row and column of the i-th sum of a lane, by the PTX ISA.
                    value = product[
                        (lane % 2) + (i & 2) + lane // 16 * 4, (i & 4) + (lane & 2) + (i & 1)
                    ]
                    row = which % 2 * 8 + (place(lane) & 5) + 2 * (i // 2 % 2)
                    channel = which // 2 * 16 + (place(lane) & 2) * 4
                    c[row, channel + 4 * h + i // 4 * 2 + i % 2] = value
    return c


def integers(*shape: int) -> Tensor:
    return torch.randint(-8, 8, shape).float()


@pytest.mark.parametrize(
    ("tile_of", "loaded"), [(turing_tile, turing_loaded), (volta_tile, volta_loaded)]
)
def test_lanes_multiply_what_belongs_together(tile_of, loaded):
    a, weight = integers(16, 16), integers(32, 16)
    assert torch.equal(tile_of(a, loaded(weight)), a @ weight.t())


@pytest.mark.parametrize(
    ("tile_of", "gathered"), [(turing_tile, turing_gathered), (volta_tile, volta_gathered)]
)
def test_two_tiles_take_rows_by_eight_values(tile_of, gathered):
    """Each takes its half of the 8 values of a, too."""
    a, weight = integers(16, 32), integers(32, 32)
    halves = a.view(16, 4, 2, 4).unbind(2)
    made = [tile_of(half.reshape(16, 16), gathered(weight, i)) for i, half in enumerate(halves)]
    assert torch.equal(sum(made), a @ weight.t())


def test_dtypes_that_tensor_cores_take():
    assert why_not_elements("float16", load_arch("sm70")) is None
    assert why_not_elements("bfloat16", load_arch("sm80")) is None
    assert "have no bfloat16" in why_not_elements("bfloat16", load_arch("sm75"))
    assert "not float32" in why_not_elements("float32", load_arch("sm90"))
