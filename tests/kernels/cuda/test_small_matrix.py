"""The order in which the kernels of squeeze-and-excite read their matrices."""

from __future__ import annotations

import itertools

import pytest
import torch

from plantune.graph.types import TensorType
from plantune.kernels.cuda.small_matrix import TILE, matrix, why_not_mma
from plantune.kernels.family import Frame
from plantune.kernels.patterns.squeeze_excite import Layer
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


FLOAT = TensorType((), "float32")


def layer(*, by_rows, depth):
    return Layer("w", by_rows, None, 5, depth)


@pytest.mark.parametrize("by_rows", [False, True])
def test_a_layer_is_padded_to_whole_vectors_however_its_weight_stands(by_rows):
    weight = torch.randn(5, 12)
    values = {"w": weight if by_rows else weight.t()}
    constant = matrix(layer(by_rows=by_rows, depth=12), FLOAT, 8).of("w", Frame(values))
    constant.fill()
    assert constant.tensor.shape == (5, 16)
    assert torch.equal(constant.tensor[:, :12], weight)
    assert not constant.tensor[:, 12:].any()
    assert not constant.is_in_place()


@pytest.mark.parametrize("unit", [8, 16])
def test_whole_vectors_of_a_weight_are_read_in_place(unit):
    values = {"w": torch.randn(5, 16)}
    constant = matrix(layer(by_rows=True, depth=16), FLOAT, unit).of("w", Frame(values))
    assert constant.tensor.data_ptr() == values["w"].data_ptr()
    values["w"] = torch.randn(16, 5).t()
    constant.fill()
    assert constant.tensor.data_ptr() != values["w"].data_ptr()
    assert torch.equal(constant.tensor, values["w"])


def stride_of(steps: int) -> int:
    """SmallMatrixMma::kStride."""
    return 16 * steps + 2 * ((40 - 8 * steps % 32) % 32)


@pytest.mark.parametrize("steps", range(1, 34))
def test_lanes_that_read_vectors_at_once_share_no_bank(steps):
    stride = stride_of(steps)
    assert stride % 4 == 0
    assert stride <= 16 * steps + 3 * TILE
    for half, step in itertools.product((0, 16), range(steps)):
        # 8 bytes of each of 16 lanes: four columns, four places.
        places = {
            (lane // 4) * stride + 4 * (4 * step + lane % 4) for lane in range(half, half + 16)
        }
        assert len({place // 4 % 16 for place in places}) == 16


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (20, 48), (5, 32)])
def test_lanes_multiply_what_belongs_together(rows, columns):
    """m16n8k16 as the PTX ISA lists its fragments, with the lanes' columns of SmallMatrixMma."""
    weight, vectors = torch.randn(rows, columns).double(), torch.randn(columns, 8).double()
    made = torch.zeros(-(-rows // 16) * 16, 8).double()
    for tile, step in itertools.product(range(made.shape[0] // 16), range(columns // 16)):
        left, right = torch.zeros(16, 16).double(), torch.zeros(16, 8).double()
        for lane in range(32):
            g, t = divmod(lane, 4)
            columns_of_lane = range(16 * step + 4 * t, 16 * step + 4 * t + 4)
            terms = (2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9)
            for term, column in zip(terms, columns_of_lane, strict=True):
                for row in (g, g + 8):
                    if 16 * tile + row < rows:
                        left[row, term] = weight[16 * tile + row, column]
                right[term, g] = vectors[column, g]
        made[16 * tile : 16 * tile + 16] += left @ right
    torch.testing.assert_close(made[:rows], weight @ vectors)
    assert not made[rows:].any()
