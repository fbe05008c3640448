"""The few calls of the CUDA driver that plantune makes itself, by ctypes: its ABI is stable."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char, c_int, c_uint, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

from plantune.errors import CudaError

REGISTERS, LOCAL_BYTES, DYNAMIC_SHARED_BYTES, NON_PORTABLE_CLUSTER = 4, 3, 8, 14
STATIC_SHARED_BYTES, PTX_VERSION = 1, 5
CLUSTER_DIMENSION, PROGRAMMATIC_SERIALIZATION = 4, 6
TENSOR_MAP_BYTES, TENSOR_MAP_ALIGNMENT = 128, 64
TENSOR_MAP_DTYPES = {
    "uint8": 0, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9, "tfloat32": 11
}  # fmt: skip
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
PROMOTE_256_BYTES = 3
NON_BLOCKING = 1


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: its value is a union of 64 bytes."""

    _fields_ = (("id", c_uint), ("pad", c_uint), ("value", c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(_Attribute)),
        ("count", c_uint),
    )


class TensorMap(ctypes.Structure):
    """What the tensor memory accelerator knows of a tensor; passed by value to a kernel."""

    _fields_ = (("opaque", c_char * TENSOR_MAP_BYTES),)


@cache
def _cuda() -> Any:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"no CUDA driver was found ({error}); install NVIDIA's driver") from error
    _check("cuInit", library.cuInit(0), library)
    return library


def _call(name: str, *arguments: Any) -> None:
    library = _cuda()
    function = getattr(library, name, None)
    if function is None:
        raise CudaError(f"the CUDA driver has no {name}: it is too old; install a newer one")
    _check(name, function(*arguments), library)


def _check(name: str, code: int, library: Any) -> None:
    if code:
        text = ctypes.c_char_p()
        library.cuGetErrorString(code, byref(text))
        raise CudaError(f"{name} failed with {code}: {(text.value or b'unknown').decode()}")


def driver_version() -> tuple[int, int]:
    """The CUDA release that the driver knows."""
    number = c_int()
    _call("cuDriverGetVersion", byref(number))
    return number.value // 1000, number.value % 1000 // 10


def load_module(image: bytes) -> c_void_p:
    """The kernels of a binary, on the current device."""
    module = c_void_p()
    _call("cuModuleLoadData", byref(module), image)
    return module


def function_of(module: c_void_p, name: str) -> c_void_p:
    function = c_void_p()
    _call("cuModuleGetFunction", byref(function), module, name.encode())
    return function


def attribute(function: c_void_p, which: int) -> int:
    value = c_int()
    _call("cuFuncGetAttribute", byref(value), which, function)
    return value.value


def set_attribute(function: c_void_p, which: int, value: int) -> None:
    _call("cuFuncSetAttribute", function, which, value)


def make_stream() -> int:
    """A stream of the current device that nobody else has: torch deals out the same 32 in turns,
    and what another thread sends to a stream that is being captured becomes a part of that graph.
    """
    stream = c_void_p()
    _call("cuStreamCreate", byref(stream), NON_BLOCKING)
    return stream.value or 0


@dataclass(frozen=True)
class Extent:
    """How many blocks of how many threads, and what each block gets.

    With `programmatic` the kernel may start before the one in front of it ended.
    """

    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    programmatic: bool = False


def launch(function: c_void_p, stream: int, extent: Extent, arguments: Sequence[Any]) -> None:
    """Launches on a stream; `arguments` are ctypes values, passed by value."""
    attributes = []
    if extent.cluster != (1, 1, 1):
        attributes.append(_Attribute(CLUSTER_DIMENSION, 0, (c_uint * 16)(*extent.cluster)))
    if extent.programmatic:
        attributes.append(_Attribute(PROGRAMMATIC_SERIALIZATION, 0, (c_uint * 16)(1)))
    kept = (_Attribute * len(attributes))(*attributes)
    grid, block = (c_uint * 3)(*extent.grid), (c_uint * 3)(extent.threads, 1, 1)
    config = _Config(grid, block, extent.shared_bytes, stream, kept, len(attributes))
    addresses = (c_void_p * len(arguments))(*(ctypes.addressof(value) for value in arguments))
    _call("cuLaunchKernelEx", byref(config), function, addresses, None)


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

    Along a dimension with a step, every step-th element of the box is loaded. What lies outside of
    the tensor is read as zero.
    """
    rank = len(sizes)
    memory = ctypes.create_string_buffer(TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT)
    start = -ctypes.addressof(memory) % TENSOR_MAP_ALIGNMENT
    _call(
        "cuTensorMapEncodeTiled",
        c_void_p(ctypes.addressof(memory) + start),
        TENSOR_MAP_DTYPES[dtype],
        rank,
        c_void_p(address),
        (c_uint64 * rank)(*sizes),
        (c_uint64 * max(rank - 1, 1))(*strides_bytes),
        (c_uint32 * rank)(*box),
        (c_uint32 * rank)(*(steps or [1] * rank)),
        0,  # not interleaved
        SWIZZLES[swizzle_bytes],
        PROMOTE_256_BYTES,
        0,  # zeros outside
    )
    return TensorMap.from_buffer_copy(memory, start)
