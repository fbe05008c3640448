"""The order in which the kernels of squeeze-and-excite read their matrices."""

from __future__ import annotations

import pytest
import torch

from plantune.kernels.patterns.squeeze_excite import Layer
from plantune.kernels.small_matrix import SmallMatrix, why_not_mma
from plantune.space.arch import load_arch


@pytest.mark.parametrize(
    ("dtype", "images", "arch", "reason"),
    [
        ("float16", 2, "sm80", None),
        ("bfloat16", 4, "sm120", None),
        ("float16", 8, "sm90", "columns for 2 to 4 images, got 8"),
        ("float16", 1, "sm90", "columns for 2 to 4 images, got 1"),
        ("float16", 2, "sm75", "got float16 on sm75"),
        ("float32", 2, "sm90", "got float32 on sm90"),
    ],
)
def test_where_tensor_cores_multiply(dtype, images, arch, reason):
    got = why_not_mma(dtype, images, load_arch(arch))
    assert got is None if reason is None else reason in got


def test_rows_are_padded_to_whole_vectors():
    weight = torch.randn(5, 12)
    packed = SmallMatrix(5, 12, 8, mma=False).packed(weight)
    assert packed.shape == (5, 16)
    assert torch.equal(packed[:, :12], weight)
    assert not packed[:, 12:].any()


def layer(*, by_rows):
    return Layer("w", by_rows, None, 5)


@pytest.mark.parametrize("mma", [False, True])
@pytest.mark.parametrize("by_rows", [False, True])
def test_a_layer_is_packed_however_its_weight_stands(by_rows, mma):
    weight = torch.randn(5, 12)
    matrix = SmallMatrix(5, 12, 16, mma=mma)
    values = {"w": weight if by_rows else weight.t()}
    constant = matrix.constant(values, layer(by_rows=by_rows), torch.empty(0))
    constant.fill()
    assert torch.equal(constant.tensor, matrix.packed(weight))
    assert not constant.is_in_place()


def test_whole_vectors_of_a_weight_are_read_in_place():
    matrix, values = SmallMatrix(5, 16, 8, mma=False), {"w": torch.randn(5, 16)}
    constant = matrix.constant(values, layer(by_rows=True), torch.empty(0))
    assert constant.tensor.data_ptr() == values["w"].data_ptr()
    values["w"] = torch.randn(16, 5).t()
    constant.fill()
    assert constant.tensor.data_ptr() != values["w"].data_ptr()
    assert torch.equal(constant.tensor, values["w"])


def test_a_lane_finds_its_elements_side_by_side():
    weight = torch.randn(20, 40)
    packed = SmallMatrix(20, 40, 16, mma=True).packed(weight)
    padded = torch.zeros(32, 48)
    padded[:20, :40] = weight
    lanes = packed.reshape(2, 3, 32, 4, 2)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for r in range(4):
            rows = g + 8 * (r % 2) + torch.tensor([0, 16])
            columns = 2 * t + 8 * (r // 2) + torch.tensor([0, 16, 32])
            for e in range(2):
                assert torch.equal(lanes[:, :, lane, r, e], padded[rows][:, columns + e])
