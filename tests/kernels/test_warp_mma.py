"""Packed weights against the fragments of the matrix instructions, as the PTX ISA lists them.

`csrc/cuda/warp_mma.h` says which rows, runs and channels a lane holds; its words are repeated here.
"""

from __future__ import annotations

import pytest
import torch

from plantune.kernels.warp_mma import PackedWeight, why_not_elements
from plantune.space.arch import load_arch

LANES = range(32)


def turing_tile(a, tile):
    """c (16, 32) of m16n8k16 or two m16n8k8, from a (16, 16) and a packed tile."""
    vectors, c = tile.reshape(2, 32, 8), torch.zeros(16, 32)
    for j in range(4):
        left, right = torch.zeros(16, 16), torch.zeros(16, 8)
        for lane in LANES:
            group, place = lane // 4, lane % 4
            run_of_b = vectors[j // 2, lane, j % 2 * 4 :][:4]
            # The instruction's own place of the i-th value of a run.
            values = [2 * place, 2 * place + 1, 2 * place + 8, 2 * place + 9]
            for i in (0, 1):
                left[group + 8 * i, values] = a[group + 8 * i, 4 * place : 4 * place + 4]
            right[values, group] = run_of_b
        product = left @ right
        for lane in LANES:
            group, place = lane // 4, lane % 4
            for i in (0, 1):
                got = product[group + 8 * i, 2 * place : 2 * place + 2]
                c[group + 8 * i, 8 * place + 2 * j : 8 * place + 2 * j + 2] = got
    return c


def volta_tile(a, tile):
    """The same of m8n8k4: four groups of eight lanes, each with operands of its own."""
    runs, c = tile.reshape(2 * 32 * 2, 4), torch.zeros(16, 32)

    def group(lane):
        return lane // 4 % 4

    def place(lane):
        return lane % 4 + lane // 16 * 4

    for h in (0, 1):
        for quad in range(4):
            product = torch.zeros(8, 8)
            members = [lane for lane in LANES if group(lane) == quad]
            for j in range(4):
                left, right = torch.zeros(8, 4), torch.zeros(4, 8)
                for lane in members:
                    row = (quad // 2 * 2 + place(lane) // 2 % 2) * 2 + place(lane) % 2
                    left[place(lane)] = a[quad % 2 * 8 + place(lane), 4 * j : 4 * j + 4]
                    right[:, place(lane)] = runs[(32 * h + 4 * row + j) * 2 + place(lane) // 4]
                product += left @ right
            for lane in members:
                for i in range(8):
                    # Row and column of the i-th sum of a lane, by the PTX ISA.
                    value = product[
                        (lane % 2) + (i & 2) + lane // 16 * 4, (i & 4) + (lane & 2) + (i & 1)
                    ]
                    row = quad % 2 * 8 + (place(lane) & 5) + 2 * (i // 2 % 2)
                    channel = quad // 2 * 16 + (place(lane) & 2) * 4
                    c[row, channel + 4 * h + i // 4 * 2 + i % 2] = value
    return c


@pytest.mark.parametrize("tile_of", [turing_tile, volta_tile])
@pytest.mark.parametrize(("channels", "values", "tile_n"), [(64, 48, 32), (40, 24, 64), (8, 5, 32)])
def test_lanes_multiply_what_belongs_together(tile_of, channels, values, tile_n):
    random = torch.Generator().manual_seed(0)
    a = torch.randint(-8, 8, (16, values), generator=random).float()
    weight = torch.randint(-8, 8, (channels, values), generator=random).float()
    packed = PackedWeight((channels, values), tile_n).packed(weight)
    tiles_k, tiles_n = packed.shape[:2]
    wide = torch.nn.functional.pad(a, (0, 16 * tiles_k - values))
    rows = torch.cat(
        [
            sum(tile_of(wide[:, 16 * k : 16 * k + 16], packed[k, n]) for k in range(tiles_k))
            for n in range(tiles_n)
        ],
        dim=1,
    )
    assert tiles_n * 32 % tile_n == 0
    assert torch.equal(rows[:, :channels], a @ weight.t())
    assert not rows[:, channels:].any()


def test_a_weight_is_packed_anew_in_place():
    packing, values = PackedWeight((8, 16), 32), {"w": torch.ones(8, 16)}
    constant = packing.constant(values, "w", torch.empty(0))
    constant.fill()
    before = constant.tensor.data_ptr()
    values["w"] = torch.arange(128.0).view(16, 8).t()
    constant.fill()
    assert constant.tensor.data_ptr() == before
    assert torch.equal(constant.tensor, packing.packed(values["w"]))


def test_pixels_of_a_weight_are_values_of_its_rows():
    weight = torch.randn(8, 4, 2, 2)
    packing = PackedWeight((8, 16), 32)
    assert torch.equal(packing.packed(weight), packing.packed(weight.reshape(8, 16)))


def test_dtypes_that_tensor_cores_take():
    assert why_not_elements("float16", load_arch("sm70")) is None
    assert why_not_elements("bfloat16", load_arch("sm80")) is None
    assert "have no bfloat16" in why_not_elements("bfloat16", load_arch("sm75"))
    assert "not float32" in why_not_elements("float32", load_arch("sm90"))
