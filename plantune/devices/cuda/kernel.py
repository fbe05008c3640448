"""A kernel of a binary on the current device, ready to launch."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plantune.devices.cuda import driver, recording
from plantune.devices.cuda.build import Binary
from plantune.devices.cuda.loops import Loop

Dimensions = tuple[int, int, int]
# More shared memory than this, with what the kernel declares, must be asked for.
SHARED_BYTES_FREE = 48 << 10
PORTABLE_CLUSTER = 8

_loaded: dict[tuple[str, int], ctypes.c_void_p] = {}
# Shared memory requested per function: instances of a kernel share it, so it must never shrink.
_granted: dict[int, int] = {}
_lock = threading.Lock()


class Kernel:
    """`name` of a binary. Its module stays loaded as long as the process lives: graphs hold it.

    The blocks of one that is `cooperative` run all at once: they may wait for each other.
    """

    def __init__(self, binary: Binary, name: str = "run", *, cooperative: bool = False) -> None:
        self._cooperative = cooperative
        self._function = driver.function_of(_module(binary), name)
        declared = driver.attribute(self._function, driver.STATIC_SHARED_BYTES)
        self._free_bytes = SHARED_BYTES_FREE - declared
        self._large_clusters = False

    def launch(
        self,
        stream: int,
        grid: Dimensions,
        block: int,
        arguments: Sequence[Any],
        *,
        shared_bytes: int = 0,
        cluster: Dimensions = (1, 1, 1),
        programmatic: bool = False,
    ) -> None:
        """Launches on a stream. Arguments are tensors (their address) and ctypes values.

        With `programmatic` it may start before the kernel in front of it ended, and must wait with
        griddepcontrol before it reads what that one wrote.
        """
        self._ask_for(shared_bytes)
        if cluster[0] * cluster[1] * cluster[2] > PORTABLE_CLUSTER and not self._large_clusters:
            driver.set_attribute(self._function, driver.NON_PORTABLE_CLUSTER, 1)
            self._large_clusters = True
        extent = driver.Extent(grid, block, shared_bytes, cluster, programmatic, self._cooperative)
        values = [_value(argument) for argument in arguments]
        recording.launch(self._function, stream, extent, values)

    def add_to(
        self,
        loop: Loop,
        grid: Dimensions,
        block: int,
        arguments: Sequence[Any],
        *,
        shared_bytes: int = 0,
    ) -> None:
        """As `launch`, in each turn of a loop of the graph that is being captured."""
        self._ask_for(shared_bytes)
        values = [_value(argument) for argument in arguments]
        loop.add(self._function, driver.Extent(grid, block, shared_bytes), values)

    def blocks_at_once(self, threads: int, shared_bytes: int) -> int:
        """How many blocks the current device runs at once."""
        self._ask_for(shared_bytes)
        of_one = driver.blocks_at_once(self._function, threads, shared_bytes)
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        return of_one * int(device.multi_processor_count)

    def _ask_for(self, shared_bytes: int) -> None:
        handle = self._function.value or 0
        with _lock:
            if shared_bytes > _granted.get(handle, self._free_bytes):
                driver.set_attribute(self._function, driver.DYNAMIC_SHARED_BYTES, shared_bytes)
                _granted[handle] = shared_bytes

    @property
    def written_for(self) -> tuple[int, int]:
        """The compute capability for which it was compiled, below that of the chip for PTX."""
        return divmod(driver.attribute(self._function, driver.PTX_VERSION), 10)

    @property
    def registers(self) -> int:
        return driver.attribute(self._function, driver.REGISTERS)


def _module(binary: Binary) -> ctypes.c_void_p:
    device = torch.cuda.current_device()
    with _lock:
        if (binary.key, device) not in _loaded:
            # Makes the device's context that of this thread.
            torch.cuda.set_device(device)
            _loaded[binary.key, device] = driver.load_module(binary.image)
        return _loaded[binary.key, device]


def _value(argument: Any) -> Any:
    return ctypes.c_void_p(argument.data_ptr()) if isinstance(argument, Tensor) else argument
