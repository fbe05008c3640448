"""The few calls of the CUDA driver that plantune makes itself, by ctypes: its ABI is stable."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

from plantune.devices.cuda.structs import fields
from plantune.errors import CudaError

REGISTERS, DYNAMIC_SHARED_BYTES, NON_PORTABLE_CLUSTER = 4, 8, 14
STATIC_SHARED_BYTES, PTX_VERSION = 1, 5
COOPERATIVE, CLUSTER_DIMENSION, PROGRAMMATIC_SERIALIZATION = 2, 4, 6
NON_BLOCKING = 1
ACTIVE = 1  # of a capture


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: its value is a union of 64 bytes."""

    _fields_ = fields("id:uint pad:uint value:uint[16]")


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = fields(
        "grid:uint[3] block:uint[3] shared_bytes:uint stream attributes:kept count:uint",
        kept=POINTER(_Attribute),
    )


@cache
def _cuda() -> Any:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"no CUDA driver was found ({error}); install NVIDIA's driver") from error
    _check("cuInit", library.cuInit(0), library)
    return library


def call(name: str, *arguments: Any) -> None:
    """Raises CudaError if a call returns anything but success."""
    library = _cuda()
    function = getattr(library, name, None)
    if function is None:
        raise CudaError(f"the CUDA driver has no {name}: it is too old; install a newer one")
    _check(name, function(*arguments), library)


def made(name: str, result: Any, *arguments: Any) -> Any:
    """The value that a call writes to `result`, its first argument."""
    call(name, byref(result), *arguments)
    return result.value


def _check(name: str, code: int, library: Any) -> None:
    if code:
        text = ctypes.c_char_p()
        library.cuGetErrorString(code, byref(text))
        raise CudaError(f"{name} failed with {code}: {(text.value or b'unknown').decode()}")


def driver_version() -> tuple[int, int]:
    """The CUDA release that the driver knows."""
    number: int = made("cuDriverGetVersion", c_int())
    return number // 1000, number % 1000 // 10


def load_module(image: bytes) -> c_void_p:
    """The kernels of a binary, on the current device."""
    return c_void_p(made("cuModuleLoadData", c_void_p(), image))


def function_of(module: c_void_p, name: str) -> c_void_p:
    return c_void_p(made("cuModuleGetFunction", c_void_p(), module, name.encode()))


def attribute(function: c_void_p, which: int) -> int:
    return int(made("cuFuncGetAttribute", c_int(), which, function))


def set_attribute(function: c_void_p, which: int, value: int) -> None:
    call("cuFuncSetAttribute", function, which, value)


def blocks_at_once(function: c_void_p, threads: int, shared_bytes: int) -> int:
    """How many blocks of a kernel a multiprocessor of the current device runs at once."""
    name, room = "cuOccupancyMaxActiveBlocksPerMultiprocessor", c_size_t(shared_bytes)
    return int(made(name, c_int(), function, threads, room))


def make_stream(priority: int = 0) -> int:
    """A stream of the current device for plantune alone: torch deals out the same 32 in turns,
    and what another thread sends to a stream that is being captured becomes a part of that graph.
    Blocks of streams with smaller numbers come first.
    """
    return made("cuStreamCreateWithPriority", c_void_p(), NON_BLOCKING, priority) or 0


@dataclass(frozen=True)
class Extent:
    """How many blocks of how many threads, and what each block gets.

    With `programmatic` the kernel may start before the one in front of it ended. If it is
    `cooperative`, all blocks run at once, or the launch fails: they may wait for each other.
    """

    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    programmatic: bool = False
    cooperative: bool = False


def launch(function: c_void_p, stream: int, extent: Extent, arguments: Sequence[Any]) -> None:
    """Launches on a stream; `arguments` are ctypes values, passed by value."""
    attributes = []
    if extent.cluster != (1, 1, 1):
        attributes.append(_Attribute(CLUSTER_DIMENSION, 0, (c_uint * 16)(*extent.cluster)))
    if extent.cooperative:
        attributes.append(_Attribute(COOPERATIVE, 0, (c_uint * 16)(1)))
    if extent.programmatic:
        attributes.append(_Attribute(PROGRAMMATIC_SERIALIZATION, 0, (c_uint * 16)(1)))
    kept = (_Attribute * len(attributes))(*attributes)
    grid, block = (c_uint * 3)(*extent.grid), (c_uint * 3)(extent.threads, 1, 1)
    config = _Config(grid, block, extent.shared_bytes, stream, kept, len(attributes))
    addresses = (c_void_p * len(arguments))(*(ctypes.addressof(value) for value in arguments))
    call("cuLaunchKernelEx", byref(config), function, addresses, None)


def encode_tensor_map(place: int, address: int, *what: Any) -> None:
    """Writes how boxes of the tensor at `address` are loaded to a place that is aligned for it."""
    dtype, rank, *rest = what
    call("cuTensorMapEncodeTiled", c_void_p(place), dtype, rank, c_void_p(address), *rest)


def capture_of(stream: int) -> tuple[int, int | None] | None:
    """The number of the capture that is under way on a stream and, if the driver tells it, the last
    node that the stream added; None outside of a capture.
    """
    status, number, count = c_int(), c_uint64(), c_size_t()
    graph, nodes, edges = c_void_p(), POINTER(c_void_p)(), c_void_p()
    arguments = [c_void_p(stream), *map(byref, (status, number, graph, nodes, edges, count))]
    name = "cuStreamGetCaptureInfo_v3"
    if not hasattr(_cuda(), name):  # a driver from before CUDA 12.3 knows no edges
        name = "cuStreamGetCaptureInfo_v2"
        del arguments[5]
    call(name, *arguments)
    if status.value != ACTIVE:
        return None
    return number.value, nodes[0] if count.value == 1 else None


class NodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS, version 2."""

    _fields_ = fields(
        "function grid:uint[3] block:uint[3] shared_bytes:uint "
        "arguments:places extra kernel context",
        places=POINTER(c_void_p),
    )


def node_updater(executable: int, node: int, params: NodeParams) -> Callable[[], None]:
    """Gives a kernel of an instantiated graph these parameters, from its next launch on."""
    library, name = _cuda(), "cuGraphExecKernelNodeSetParams_v2"
    set_params = getattr(library, name)
    graph, place, pointer = c_void_p(executable), c_void_p(node), byref(params)

    def run() -> None:
        code = set_params(graph, place, pointer)
        if code:
            _check(name, code, library)

    return run


def graph_launcher(executable: int) -> Callable[[c_void_p], None]:
    """Launches an instantiated graph on a stream."""
    library, handle = _cuda(), c_void_p(executable)
    launch_graph = library.cuGraphLaunch

    def run(stream: c_void_p) -> None:
        code = launch_graph(handle, stream)
        if code:
            _check("cuGraphLaunch", code, library)

    return run
