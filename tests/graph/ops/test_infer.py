"""What each op refuses, and how much arithmetic it counts."""

from __future__ import annotations

from typing import Any

import pytest

from plantune.base.canonical import Attrs
from plantune.errors import InvalidGraph
from plantune.graph.ops import OPS, op_named
from plantune.graph.ops.functions import FUNCTIONS
from plantune.graph.types import TensorType

CONV = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
POOL = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1)}
AVG = {**POOL, "count_padding": True}
IMAGE, KERNEL = (2, 4, 8, 8), (6, 4, 3, 3)
PLAIN = {"transpose_a": False, "transpose_b": False}
NORM = {"eps": 1e-5, "momentum": 0.1}
C = (4,)
HALF = TensorType((4,), "float16")
WHOLE = TensorType((2, 3), "int64")
WORDS = {"begin": 0, "end": 1, "max_steps": 4, "lengths": False, "noise": False}
GRUS = [(11, 4), (9, 4), (9, 3), (9,), (9,), (7, 4), (9, 7), (9, 3), (9,), (9,), (7, 10), (7,)]

# op, inputs, attributes, what the message says
REFUSED: list[tuple[str, list[Any], dict[str, Any], str]] = [
    ("conv2d", [(4, 8, 8), KERNEL], CONV, "needs rank 4"),
    ("conv2d", [IMAGE, (6, 4, 3)], CONV, "needs rank 4"),
    ("conv2d", [IMAGE, TensorType(KERNEL, "float16")], CONV, "dtypes differ: float32 and float16"),
    ("conv2d", [IMAGE, (6, 3, 3, 3)], CONV, r"4 channels do not fit weight \(6, 3, 3, 3\)"),
    ("conv2d", [IMAGE, (6, 2, 3, 3)], CONV, "in 1 groups"),
    ("conv2d", [IMAGE, (5, 2, 3, 3)], {**CONV, "groups": 2}, "in 2 groups"),
    ("conv2d", [IMAGE, KERNEL], {**CONV, "groups": 0}, "in 0 groups"),
    ("conv2d", [IMAGE, (6, 4, 9, 3)], CONV, "is smaller than kernel"),
    ("conv2d", [IMAGE, KERNEL], {**CONV, "dilation": (4, 1)}, "is smaller than kernel"),
    ("conv2d", [IMAGE, KERNEL], {**CONV, "stride": (0, 1)}, "stride and dilation start at 1"),
    ("conv2d", [IMAGE, KERNEL], {**CONV, "stride": (-1, 1)}, "stride and dilation start at 1"),
    ("conv2d", [IMAGE, KERNEL], {**CONV, "dilation": (1, 0)}, "stride and dilation start at 1"),
    ("conv2d", [IMAGE, KERNEL], {**CONV, "padding": (0, -1)}, "padding at 0"),
    ("conv2d", [IMAGE, (6, 4, 0, 3)], CONV, "is empty"),
    ("conv2d_dgrad", [(2, 6, 5, 6), KERNEL], {**CONV, "shape": IMAGE}, "needs .2, 6, 6, 6."),
    ("conv2d_dgrad", [(2, 6, 6, 6), KERNEL], {**CONV, "shape": IMAGE[1:]}, "needs rank 4"),
    ("conv2d_wgrad", [(2, 6, 5, 6), IMAGE], {**CONV, "shape": KERNEL}, "needs .2, 6, 6, 6."),
    ("conv2d_wgrad", [(2, 6, 6, 6), IMAGE], {**CONV, "shape": (6, 3, 3, 3)}, "do not fit"),
    ("matmul", [(2, 3, 4), (4, 5)], PLAIN, "needs matrices"),
    ("matmul", [(3, 4), (5, 4)], PLAIN, "inner sizes differ: 4 and 5"),
    ("matmul", [(3, 4), (4, 5)], {**PLAIN, "transpose_a": True}, "inner sizes differ: 3 and 4"),
    ("matmul", [(3, 4), TensorType((4, 5), "float64")], PLAIN, "dtypes differ"),
    ("batch_norm", [(4,), C, C, C, C], NORM, "needs rank 2"),
    ("batch_norm", [IMAGE, C, C, (1,), C], NORM, r"per-channel inputs need shape \(4,\)"),
    ("batch_norm", [(1, 4, 1, 1), C, C, C, C], NORM, "needs more than one value"),
    ("batch_norm_grad", [(2, 4, 8, 7), IMAGE, C, C, C], {}, "dy has shape"),
    ("batch_norm_grad", [IMAGE, IMAGE, C, C, (5,)], {}, "per-channel inputs need shape"),
    ("batch_norm_grad", [(4,), (4,), C, C, C], {}, "needs rank 2"),
    ("batch_norm_again", [IMAGE, C, C, C, (5,)], {}, "per-channel inputs need shape"),
    ("batch_norm_again", [(4,), C, C, C, C], {}, "needs rank 2"),
    ("layer_norm", [(4,)] * 4, {"axes": 1}, "takes 1 to 3 inputs, got 4"),
    ("layer_norm", [(4,)], {"axes": 2}, r"\(4,\) has no 2 last axes"),
    ("layer_norm", [IMAGE, C], {"axes": 1}, "weight and bias need"),
    ("group_norm", [IMAGE], {"groups": 3}, "do not divide into 3 groups"),
    ("layer_norm_grad", [(2, 4), (2, 4)], {"axes": 1, "affine": 0}, "cannot take 2 inputs"),
    ("layer_norm_grad", [C, (2, 4), C, C], {"axes": 1, "affine": 0}, "dy has shape"),
    ("layer_norm_grad", [(2, 4)] * 4, {"axes": 1, "affine": 0}, "statistics need"),
    (
        "group_norm_grad",
        [(2, 4), (2, 4), (2, 2), (2, 2), (2,)],
        {"groups": 2, "affine": 1},
        "the weight needs",
    ),
    ("group_norm_grad", [(2, 4)] * 4, {"groups": 3, "affine": 0}, "do not divide"),
    ("add", [(3,), (2, 3)], {}, r"shape \(2, 3\) does not broadcast to \(3,\)"),
    ("add", [(2, 1), (2, 3)], {}, "does not broadcast"),
    ("add_apart", [(2, 1), (2, 3)], {"step": 0.1, "least": 0.0}, "does not broadcast"),
    ("apart_grad", [(2, 3), (3, 2), (1,)], {}, "inputs differ"),
    ("apart_grad", [(2, 1), (2, 1), (2, 3)], {}, "does not broadcast"),
    ("sub", [(2, 3), (2,)], {}, "does not broadcast"),
    ("mul", [(4,), HALF], {}, "dtypes differ: float32 and float16"),
    ("div", [(2, 1), (2, 3)], {}, "does not broadcast"),
    ("div", [(4,), HALF], {}, "dtypes differ: float32 and float16"),
    ("cast", [C], {"dtype": "int64"}, "makes floating dtypes, not int64"),
    ("cast", [C], {"dtype": "uint8"}, "makes floating dtypes, not uint8"),
    ("cast", [C], {"dtype": "float8"}, "dtype 'float8' is not one of float64, float32, float16"),
    ("add_channel", [IMAGE, (8,)], {"axis": 1}, "axis 1 of .* needs shape"),
    ("add_channel", [IMAGE, C], {"axis": 4}, "axis 4 is outside"),
    ("mul_channel", [IMAGE, C], {"axis": -3}, "axis -3 is outside"),
    ("mul_channel", [(4,), HALF], {"axis": 0}, "dtypes differ"),
    ("affine", [WHOLE], {"alpha": 1, "beta": 0.5}, "int64 needs whole numbers"),
    *((f"{name}_grad", [(2, 3), (3, 2)], {}, "inputs differ") for name in FUNCTIONS),
    ("sigmoid_grad", [C, HALF], {}, "inputs differ"),
    ("avg_pool2d", [(4, 8, 8)], AVG, "needs rank 4"),
    ("avg_pool2d", [IMAGE], {**AVG, "padding": (2, 0)}, "is over half of kernel"),
    ("avg_pool2d", [IMAGE], {**AVG, "padding": (-1, 0)}, "padding at 0"),
    ("avg_pool2d", [IMAGE], {**AVG, "stride": (0, 1)}, "kernel and stride start at 1"),
    ("avg_pool2d", [IMAGE], {**AVG, "kernel": (0, 1), "padding": (0, 0)}, "start at 1"),
    ("max_pool2d", [(2, 4, 2, 8)], {**POOL, "padding": (0, 0)}, "is smaller than"),
    ("avg_pool2d_grad", [(2, 4, 4, 5)], {**AVG, "shape": IMAGE}, "dy has shape"),
    ("max_pool2d_grad", [(2, 4, 4, 4), (2, 4, 4, 4)], {**POOL, "shape": IMAGE}, "int64 places"),
    ("max_pool2d_taps", [(1, 1, 17, 17)], {**POOL, "kernel": (17, 17)}, "256 taps, got 289"),
    ("max_pool2d_taps_grad", [(2, 4, 4, 4), (2, 4, 4, 4)], {**POOL, "shape": IMAGE}, "uint8 taps"),
    ("sum", [(2, 3)], {"dims": (2,), "keepdim": False}, "do not fit"),
    ("sum", [(2, 3)], {"dims": (-1,), "keepdim": False}, "do not fit"),
    ("sum", [(2, 3)], {"dims": (1, 1), "keepdim": False}, "do not fit"),
    ("mean", [(2, 3)], {"dims": (), "keepdim": False}, "do not fit"),
    ("mean", [WHOLE], {"dims": (0,), "keepdim": False}, "needs a floating dtype, got int64"),
    ("sum_to", [(2, 3)], {"shape": (1, 2, 3)}, "does not sum to"),
    ("sum_to", [(2, 3)], {"shape": (2,)}, "does not sum to"),
    ("broadcast_to", [(2, 3)], {"shape": (3,)}, "does not broadcast to"),
    ("broadcast_to", [(2, 3)], {"shape": (2, 4)}, "does not broadcast to"),
    ("reshape", [(2, 3)], {"shape": (5,)}, "does not reshape to"),
    ("reshape", [(2, 3)], {"shape": (-2, -3)}, "sizes must be integers, 0 or more"),
    ("permute", [(2, 3)], {"dims": (0, 0)}, "not a permutation of the axes"),
    ("permute", [(2, 3)], {"dims": (0,)}, "not a permutation of the axes"),
    ("space_to_depth", [(4, 8, 8)], {"block": 2}, "needs rank 4"),
    ("space_to_depth", [(1, 1, 8, 6)], {"block": 4}, "8x6 does not divide into 4x4"),
    ("space_to_depth", [IMAGE], {"block": 0}, "does not divide"),
    ("depth_to_space", [(1, 6, 2, 2)], {"block": 2}, "6 channels do not divide by 2x2"),
    ("depth_to_space", [(6, 2, 2)], {"block": 2}, "needs rank 4"),
    ("gru_scan", [(4, 2, 9), (2, 3)], {"resets": False}, "takes 4 inputs, got 2"),
    ("gru_scan", [(4, 2, 8), (2, 3), (9, 3), (9,)], {"resets": False}, "needs gates .T, N, 3 H."),
    ("gru_scan", [(4, 2, 9), (2, 3), (9, 3), (9,), (4, 2)], {"resets": True}, "needs .*bool"),
    (
        "lstm_scan",
        [(4, 2, 8), (2, 2), (2, 3), (8, 2), (8,)],
        {"resets": False},
        r"needs .*\(8, 2\)",
    ),
    (
        "gru_scan_grad",
        [(4, 2, 3)] * 2 + [(4, 2, 9)] * 4,
        {"resets": False},
        r"gru_scan: needs .*\(9, 3\)",
    ),
    ("lstm_scan_grad", [(4, 2, 8)] * 9, {"resets": False}, r"lstm_scan: needs .*\(8, 2\)"),
    ("gru_translate", [WHOLE, *GRUS[1:]], WORDS, "needs 12 weights"),
    ("gru_translate", [C, *GRUS], WORDS, r"needs words \(S, N\)"),
    ("gru_translate", [WHOLE, *GRUS, (4, 2, 9)], {**WORDS, "noise": True}, "noise needs"),
    ("gru_translate", [WHOLE, WHOLE, *GRUS], {**WORDS, "lengths": True}, "lengths need shape .3,."),
    ("gru_translate", [WHOLE, *GRUS[:-1], TensorType((7,), "float64")], WORDS, "one dtype"),
    ("gru_translate", [WHOLE, *GRUS[:6], (9, 4), *GRUS[7:]], WORDS, "decoder_weight_ih has shape"),
]
# No input of the right number can be wrong for these.
TAKE_ANYTHING = {*FUNCTIONS, "rsqrt", "identity", "own_gradient"}


def typed(inputs: list[Any]) -> list[TensorType]:
    return [item if isinstance(item, TensorType) else TensorType(item) for item in inputs]


def test_every_op_that_can_refuse_has_a_case() -> None:
    assert {op for op, *_ in REFUSED} == set(OPS) - TAKE_ANYTHING


@pytest.mark.parametrize(("op", "inputs", "attrs", "message"), REFUSED)
def test_refuses(op: str, inputs: list[Any], attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidGraph, match=message):
        op_named(op).infer(typed(inputs), Attrs(attrs))


def test_an_unknown_op_is_named_with_the_known_ones() -> None:
    with pytest.raises(InvalidGraph, match=r"op 'conv3d' is neither one of add, add_apart"):
        op_named("conv3d")


@pytest.mark.parametrize("op", [op for op in OPS.values() if not op.pointwise])
def test_a_name_is_its_own_key(op: Any) -> None:
    assert OPS[op.name] is op


STRIDED = {"stride": (2, 2), "padding": (1, 1), "dilation": (1, 1), "groups": 2}
# op, inputs, attributes, a count by hand: outputs x inputs of each output x 2
FLOPS: list[tuple[str, list[Any], dict[str, Any], int]] = [
    ("conv2d", [IMAGE, KERNEL], CONV, (2 * 6 * 6 * 6) * (4 * 9) * 2),
    ("conv2d", [IMAGE, (6, 2, 3, 3)], STRIDED, (2 * 6 * 4 * 4) * (2 * 9) * 2),
    ("conv2d_dgrad", [(2, 6, 6, 6), KERNEL], {**CONV, "shape": IMAGE}, 432 * 36 * 2),
    ("conv2d_wgrad", [(2, 6, 6, 6), IMAGE], {**CONV, "shape": KERNEL}, 432 * 36 * 2),
    ("conv2d_wgrad", [(2, 6, 4, 4), IMAGE], {**STRIDED, "shape": (6, 2, 3, 3)}, 192 * 18 * 2),
    ("matmul", [(3, 5), (5, 7)], PLAIN, 3 * 7 * 5 * 2),
    ("matmul", [(5, 3), (7, 5)], {"transpose_a": True, "transpose_b": True}, 3 * 7 * 5 * 2),
    ("mean", [(2, 3, 4)], {"dims": (1, 2), "keepdim": False}, 24),
    ("sum_to", [(2, 3, 4)], {"shape": (1,)}, 24),
    ("avg_pool2d", [IMAGE], AVG, 2 * 4 * 4 * 4 * 9),
    ("avg_pool2d_grad", [(2, 4, 4, 4)], {**AVG, "shape": IMAGE}, 2 * 4 * 4 * 4 * 9),
    ("add", [(2, 3), (1,)], {}, 6),
    ("gru_scan", [(4, 2, 9), (2, 3), (9, 3), (9,)], {"resets": False}, 8 * 9 * (2 * 3 + 4)),
    ("gru_translate", [WHOLE, *GRUS], WORDS, 3 * 2 * (2 * 81 + 4 * (63 + 27 + 9 + 9 + 70 + 7))),
    ("reshape", [(2, 3)], {"shape": (6,)}, 0),
    ("permute", [(2, 3)], {"dims": (1, 0)}, 0),
    ("broadcast_to", [(1, 3)], {"shape": (2, 3)}, 0),
]


@pytest.mark.parametrize(("op", "inputs", "attrs", "count"), FLOPS)
def test_flops(op: str, inputs: list[Any], attrs: dict[str, Any], count: int) -> None:
    types = typed(inputs)
    outputs = OPS[op].infer(types, Attrs(attrs))
    assert OPS[op].flops(types, outputs, Attrs(attrs)) == count
