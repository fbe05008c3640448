"""What torch's libraries need in each thread before a capture there: cuBLAS and cuDNN make a handle
in a thread's first call, and cuDNN tries algorithms, which no capture can hold.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping

import torch

from plantune.runtime.watched.torch_internals import current_gpu


class _ThisThread(threading.local):
    """Its `handles`, by library and GPU, and the digests of `plans` that ran launch by launch."""

    def __init__(self) -> None:
        self.handles: set[tuple[str, int]] = set()
        self.plans: set[str] = set()


this_thread = _ThisThread()


def make_handles(libraries: Iterable[str]) -> None:
    """Those of this thread for the current GPU, if it has none yet.

    torch runs backward passes in threads of its own. A replay calls no library there, so that a
    caller who warms up and then captures a training pass would capture its first call.
    """
    for library in libraries:
        handle = library, current_gpu()
        if handle not in this_thread.handles and _FIRST_CALLS[library]():
            this_thread.handles.add(handle)


def _multiply() -> bool:
    """Whether torch lets it: under its determinism it may refuse products, the caller's, too."""
    if torch.are_deterministic_algorithms_enabled() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        return False
    x = torch.zeros(16, 16, dtype=torch.float16, device="cuda")
    torch.mm(x, x)
    return True


def _convolve() -> bool:
    """Whether cuDNN convolves now, not torch's own kernels."""
    if not torch.backends.cudnn.is_available():
        return False
    x = torch.zeros(1, 1, 1, 1, device="cuda")
    torch.cudnn_convolution(x, x, (0, 0), (1, 1), (1, 1), 1, False, True, False)
    return True


_FIRST_CALLS: Mapping[str, Callable[[], bool]] = {"cublas": _multiply, "cudnn": _convolve}
