"""The launches of a recurrent layer's kernel over a sequence."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from plantune.devices.cuda.kernel import Kernel
from plantune.errors import BuildError
from plantune.kernels.recurrent.scan_division import THREADS, Division


class Launches:
    """Those that take all groups of samples on what there is of the current device; raises
    BuildError if not even one fits.

    What blocks tell each other outlives a launch: tags tell launches apart, and begin with zeros.
    Each launch is counted by itself.
    """

    def __init__(
        self,
        kernel: Kernel,
        divided: Division,
        arguments: type[ctypes.Structure],
        device: torch.device,
    ) -> None:
        self._kernel, self._divided, self._arguments = kernel, divided, arguments
        room = kernel.blocks_at_once(THREADS, divided.shared_bytes) if divided.waits else 0
        self._groups = divided.launches(room)
        if not self._groups:
            raise BuildError(f"{divided.of_group} blocks must run at once, {room} can")
        self._words = torch.zeros(divided.words, 4, dtype=torch.int32, device=device)
        self._launches = torch.zeros(len(self._groups), dtype=torch.int64, device=device)

    def run(self, stream: int, at: Mapping[str, Tensor]) -> None:
        """With these tensors as arguments; null for those that are not there."""
        divided, sequence, first = self._divided, self._divided.sequence, 0
        names = (field[0] for field in self._arguments._fields_ if field[1] is ctypes.c_void_p)
        found = {name: at[name].data_ptr() for name in names if name in at}
        found["words"] = self._words.data_ptr()
        for launch, groups in enumerate(self._groups):
            found["launches"] = self._launches[launch].data_ptr()
            sizes = {"steps": sequence.steps, "samples": sequence.samples, "first": first}
            grid, arguments = (groups * divided.of_group, 1, 1), self._arguments(**found, **sizes)
            shared_bytes = divided.shared_bytes
            self._kernel.launch(stream, grid, THREADS, [arguments], shared_bytes=shared_bytes)
            first += groups * divided.samples


def structure(of_scan: tuple[str, ...], own: tuple[str, ...]) -> type[ctypes.Structure]:
    """The arguments of a kernel: pointers and sizes that each kind of cell has, then its own."""
    scan = [(name, ctypes.c_void_p) for name in of_scan]
    sizes = [(name, ctypes.c_int) for name in ("steps", "samples", "first")]
    fields = (*scan, *sizes, *((name, ctypes.c_void_p) for name in own))
    return type("Arguments", (ctypes.Structure,), {"_fields_": fields})
