"""A kernel with its grid, ready to be launched on what each call brings."""

from __future__ import annotations

from typing import Any

from plantune.devices.cuda.build import Binary
from plantune.devices.cuda.kernel import Kernel

# Kernels for these and later chips wait for the one in front themselves.
PROGRAMMATIC_FROM = (9, 0)


class Launcher:
    """`name` of a binary, in so many blocks; `cluster` of them share their memory."""

    def __init__(
        self,
        binary: Binary,
        blocks: int | tuple[int, ...],
        threads: int,
        *,
        name: str = "run",
        shared_bytes: int = 0,
        cluster: int = 1,
    ) -> None:
        columns, *others = (blocks,) if isinstance(blocks, int) else blocks
        rows, layers = (*others, 1, 1)[:2]
        self._kernel = Kernel(binary, name)
        self._grid, self._threads = (columns, rows, layers), threads
        self._options: dict[str, Any] = {"shared_bytes": shared_bytes, "cluster": (cluster, 1, 1)}
        self._programmatic = self._kernel.written_for >= PROGRAMMATIC_FROM

    def launch(self, stream: int, *arguments: Any, programmatic: bool = True) -> None:
        """Launches it; it overlaps the kernel in front where both can and it is `programmatic`."""
        self._kernel.launch(
            stream,
            self._grid,
            self._threads,
            arguments,
            **self._options,
            programmatic=programmatic and self._programmatic,
        )
