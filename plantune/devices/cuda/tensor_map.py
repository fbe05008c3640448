"""Tensor maps: how the tensor memory accelerator loads and stores boxes of a tensor."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_char, c_uint32, c_uint64
from typing import Any

from plantune.devices.cuda import driver, recording

BYTES, ALIGNMENT = 128, 64
DTYPES = {
    "uint8": 0, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9, "tfloat32": 11
}  # fmt: skip
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
PROMOTE_256_BYTES = 3


class TensorMap(ctypes.Structure):
    """Passed by value to a kernel."""

    _fields_ = (("opaque", c_char * BYTES),)


class Encoder:
    """Everything of a tensor map but the tensor's address."""

    def __init__(self, *what: Any) -> None:
        self._what = what
        self._memory = ctypes.create_string_buffer(BYTES + ALIGNMENT)
        self._start = -ctypes.addressof(self._memory) % ALIGNMENT

    def encoded(self, address: int) -> TensorMap:
        place = ctypes.addressof(self._memory) + self._start
        driver.encode_tensor_map(place, address, *self._what)
        return TensorMap.from_buffer_copy(self._memory, self._start)


def tensor_map(
    dtype: str,
    address: int,
    sizes: Sequence[int],
    strides_bytes: Sequence[int],
    box: Sequence[int],
    *,
    steps: Sequence[int] | None = None,
    swizzle_bytes: int = 128,
) -> TensorMap:
    """How to load boxes of a tensor; dimensions from the innermost out, whose stride is left out.

    Along a dimension with a step, every step-th element of the box is loaded. What is outside of
    the tensor is read as zero.
    """
    rank = len(sizes)
    encoder = Encoder(
        DTYPES[dtype],
        rank,
        (c_uint64 * rank)(*sizes),
        (c_uint64 * max(rank - 1, 1))(*strides_bytes),
        (c_uint32 * rank)(*box),
        (c_uint32 * rank)(*(steps or [1] * rank)),
        0,  # not interleaved
        SWIZZLES[swizzle_bytes],
        PROMOTE_256_BYTES,
        0,  # zeros outside
    )
    made = encoder.encoded(address)
    recording.note_encoder(bytes(made), encoder)
    return made
