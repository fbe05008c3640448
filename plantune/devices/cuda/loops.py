"""Loops inside of a CUDA graph: a WHILE node, whose kernels say whether there is another turn."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_char, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from plantune.devices.cuda import driver
from plantune.devices.cuda.structs import fields

NODE, WHILE, ASSIGNED_AT_LAUNCH, REPLACED = 13, 1, 1, 1
UNION_BYTES = 232  # of a node's parameters
SINCE = (12, 4)  # the CUDA release whose drivers have them


class _Conditional(ctypes.Structure):
    """CUDA_CONDITIONAL_NODE_PARAMS."""

    _fields_ = fields(
        "handle:uint64 kind:int size:uint bodies:graphs context", graphs=POINTER(c_void_p)
    )


class _NodeParams(ctypes.Structure):
    """CUgraphNodeParams."""

    _fields_ = (
        ("type", c_int),
        ("reserved", c_int * 3),
        ("conditional", _Conditional),
        ("rest", c_char * (UNION_BYTES - ctypes.sizeof(_Conditional))),
        ("last", c_uint64),
    )


class Loop:
    """The body of a loop: kernels that follow each other. One of them must set the condition of
    `handle` (cudaGraphSetConditional) in each turn.
    """

    def __init__(self, body: c_void_p, handle: int) -> None:
        self.handle = handle
        self._body = body
        self._last: list[int] = []

    def add(self, function: c_void_p, extent: driver.Extent, arguments: Sequence[Any]) -> None:
        """Adds a kernel; `arguments` are ctypes values, which the node copies."""
        addresses = (c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        params = driver.NodeParams(
            function=function,
            grid=(c_uint * 3)(*extent.grid),
            block=(c_uint * 3)(extent.threads, 1, 1),
            shared_bytes=extent.shared_bytes,
            arguments=addresses,
        )
        after = (c_void_p * 1)(*self._last)
        node = driver.made(
            "cuGraphAddKernelNode_v2",
            c_void_p(),
            self._body,
            after,
            c_size_t(len(self._last)),
            byref(params),
        )
        self._last = [node]


def can_loop() -> bool:
    """Whether the driver knows of such nodes."""
    return driver.driver_version() >= SINCE


def add_loop(stream: int, fill: Callable[[Loop], None]) -> None:
    """Adds a loop to the capture that is under way on a stream: it has at least one turn, of the
    kernels that `fill` adds.
    """
    status, number, count = c_int(), c_uint64(), c_size_t()
    graph, nodes = c_void_p(), POINTER(c_void_p)()
    found = map(byref, (status, number, graph, nodes, count))
    driver.call("cuStreamGetCaptureInfo_v2", c_void_p(stream), *found)
    context = c_void_p(driver.made("cuCtxGetCurrent", c_void_p()))
    handle = driver.made(
        "cuGraphConditionalHandleCreate",
        c_uint64(),
        graph,
        context,
        c_uint(1),
        c_uint(ASSIGNED_AT_LAUNCH),
    )
    params = _NodeParams(type=NODE)
    params.conditional = _Conditional(handle, WHILE, 1, None, context)
    node = driver.made("cuGraphAddNode", c_void_p(), graph, nodes, count, byref(params))
    fill(Loop(c_void_p(params.conditional.bodies[0]), handle))
    after = (c_void_p * 1)(node)
    driver.call(
        "cuStreamUpdateCaptureDependencies", c_void_p(stream), after, c_size_t(1), c_uint(REPLACED)
    )
