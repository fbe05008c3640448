"""Memory of cuBLAS that captured graphs can rely on."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from plantune.base.op_mode import OpMode
from plantune.base.scopes import with_values

# By device and stream; never given back, as cuBLAS's workspaces of these streams are not.
_kept: dict[tuple[int, int], torch.cuda.MemPool] = {}
# torch refuses two threads that allocate in one MemPool.
_one_thread = threading.Lock()


class _Inside(threading.local):
    """Whether this thread allocates in one already: torch refuses that, too."""

    kept = False


_inside = _Inside()
# The names of torch's ops that call cuBLAS have such a part.
_PRODUCT = re.compile(
    r"(?:^|_)(?:(?:add|b|baddb|addb)?mm|(?:add)?mv|v?dot(?!_product)|addr"
    r"|linalg(?!_vector_norm|_norm|_cross|_diagonal)|linear|bilinear|trilinear|matmul|multi_head"
    r"|transformer|solve|cholesky|inverse|slow_conv\w*|geqrf|ormqr|matrix_exp)(?:_|$)"
)
_CONVOLUTIONS = ("convolution", "_convolution", "convolution_backward")
_OF_CUDNN = re.compile(r"cudnn|convolution|conv_|rnn|gru|lstm|batch_norm")
# In other namespaces than torch's own any op may call it, but for these.
_NO_PRODUCTS = ("prim", "prims", "profiler", "c10d", "_c10d_functional")
_SIZE = 16  # of a product that cuBLASLt takes too


@contextmanager
def kept_workspaces() -> Iterator[None]:
    """What cuBLAS takes inside for the current stream will never be anybody else's.

    torch keeps workspaces for each stream, and captured products go on writing to them. But others
    give them back: torch.compile, when it records graphs, those of the whole process; torch 2.12,
    when a graph is destroyed, those of its stream. Later replays wrote to other tensors then (H200,
    torch 2.11, 2026-11-20). In memory of its own it stays mapped, and only products of that
    stream come back to it. Other allocators than torch's own have none: nothing is kept there.
    """
    capturing = torch.cuda.is_current_stream_capturing()
    if _inside.kept or capturing or torch.cuda.get_allocator_backend() != "native":
        yield
        return
    stream = torch.cuda.current_stream()
    place = stream.device_index, stream.cuda_stream
    with _one_thread, torch.cuda.use_mem_pool(_memory_of(*place)), with_values(_inside, kept=True):
        yield


def _memory_of(device: int, stream: int) -> torch.cuda.MemPool:
    if (device, stream) not in _kept:
        _kept[device, stream] = torch.cuda.MemPool()
    return _kept[device, stream]


class KeptProducts(OpMode):
    """Inside, all products that torch runs on a GPU have their workspaces in kept memory.

    For the runs before a capture: torch takes a workspace for each thread and stream that
    multiplies, a captured product finds it again, and autograd's threads take part in this mode.
    What multiplies nothing costs no memory: a workspace is 32 MiB on Hopper, 8 MiB elsewhere.
    `libraries` says which ones torch's ops on a GPU may have called.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ready: set[tuple[int, int, int]] = set()
        self.libraries: set[str] = set()

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch.compile's code runs as it does without this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and isinstance(func, torch._ops.OpOverload):
            with self:  # an op that consists of others comes here as a whole
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        called = libraries_of(func)
        if called and any(map(_is_on_gpu, tree_leaves((args, kwargs)))):
            self.libraries |= called
            if "cublas" in called:
                self._keep()
        return func(*args, **kwargs)

    def _keep(self) -> None:
        stream = torch.cuda.current_stream()
        key = (threading.get_ident(), stream.device_index, stream.cuda_stream)
        if key not in self._ready:
            self._ready.add(key)
            take_workspace()


def _is_on_gpu(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_cuda


def may_multiply(func: Any) -> bool:
    """Whether an op may call cuBLAS."""
    namespace = getattr(func, "namespace", "")
    if namespace != "aten":
        return namespace not in _NO_PRODUCTS
    name = func.overloadpacket.__name__
    if name in _CONVOLUTIONS:
        return not torch.backends.cudnn.enabled
    return _PRODUCT.search(name) is not None


def libraries_of(func: Any) -> set[str]:
    """Those that an op may call."""
    packet = getattr(func, "overloadpacket", None)
    of_cudnn = packet is not None and _OF_CUDNN.search(packet.__name__) is not None
    asked = {"cublas": may_multiply(func), "cudnn": of_cudnn}
    return {library for library, may in asked.items() if may}


def renew_workspace() -> None:
    """Before a capture that no run preceded: if products ran on the current stream, those of this
    thread have a workspace in kept memory again, even if another thread gave it back.
    """
    if not _kept:
        return
    stream = torch.cuda.current_stream()
    if (stream.device_index, stream.cuda_stream) in _kept:
        take_workspace()


@torch.no_grad()
def take_workspace() -> None:
    """Takes cuBLAS's and cuBLASLt's workspace of this thread for the current stream."""
    if torch.are_deterministic_algorithms_enabled() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        return  # torch refuses products then, those of the caller, too
    x = torch.zeros(_SIZE, _SIZE, dtype=torch.float16, device="cuda")
    row, y = torch.zeros_like(x[0]), torch.empty_like(x)
    with kept_workspaces():
        torch.mm(x, x, out=y)
        torch.addmm(row, x, x, out=y)


def foreign_dispatch_modes() -> bool:
    """Whether a mode of somebody else sees each operation."""
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return any(not isinstance(mode, KeptProducts) for mode in modes)
