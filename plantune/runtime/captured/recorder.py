"""A pass as a CUDA graph, with what its kernels are told at each launch."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_void_p
from dataclasses import dataclass
from functools import cached_property

import torch

from plantune.base.generators import numbers_of_its_own, state_on
from plantune.devices.cuda import driver
from plantune.devices.cuda.capture import capture, one_capture
from plantune.devices.cuda.patches import Executable
from plantune.devices.cuda.recording import Recording
from plantune.devices.cuda.workspaces import KeptProducts, renew_workspace
from plantune.runtime.program.streams import stream_for

# Libraries choose algorithms and take workspaces in their first calls, which cannot be captured.
WARM_UP_PASSES = 2
# Where torch hands out the graph that it captured.
_KEPT = {"keep_graph": True} if hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec") else {}


@dataclass(frozen=True)
class Recorded:
    """A graph, and the launches of our own kernels in it.

    If it `draws` random numbers, torch must tell each launch where its generator stands.
    """

    graph: torch.cuda.CUDAGraph
    launches: Recording
    draws: bool = False

    @cached_property
    def executable(self) -> Executable | None:
        """The one that torch replays; None where torch does not hand it out."""
        first = self.graph.raw_cuda_graph_exec() if _KEPT else None
        return None if first is None else Executable(first, self.launches)

    @cached_property
    def launch(self) -> Callable[[c_void_p], None]:
        """What launches it on a stream, the current one. For graphs without random ops: 2.6 us
        instead of the 3.9 of a replay (H200, 2026-11-22).
        """
        first = self.graph.raw_cuda_graph_exec() if _KEPT and not self.draws else None
        if first is None:
            graph = self.graph  # not `self`: a cycle would keep its memory
            return lambda stream: graph.replay()
        return driver.graph_launcher(first)


class Recorder:
    """Captures on a stream of its own; its graphs share memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = stream_for(self, device)
        self._memory = torch.cuda.graph_pool_handle()
        self._draws = False
        # What torch's ops in the captured passes may call.
        self.libraries: set[str] = set()

    def graph(
        self, run: Callable[[], None], first: bool, warm_up: Callable[[], None] | None = None
    ) -> Recorded:
        """What `run` does, after some runs of `warm_up`, or none if it ran in those of another
        graph; `first` if no other one exists yet. Torch's random numbers go on where they
        were.

        Raises what that raises. Then too, torch is as it was before.
        """
        current = torch.cuda.current_stream(self._device)
        if first:
            # torch captures nothing into memory whose graphs are all gone.
            self._memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph(**_KEPT)
        try:
            # cuDNN makes what it drops units by in its first call, of the numbers that come then:
            # after equal ones the graphs of two instances would drop the same.
            with one_capture, numbers_of_its_own(self._device):
                self._warm_up(warm_up, current)
                launches = capture(graph, run, self._side, self._device, self._memory)
                if _KEPT:
                    graph.instantiate()
        finally:
            current.wait_stream(self._side)
        return Recorded(graph, launches, self._draws)

    def _warm_up(self, run: Callable[[], None] | None, current: torch.cuda.Stream) -> None:
        before = state_on(self._device)
        self._side.wait_stream(current)
        with torch.cuda.device(self._device), torch.cuda.stream(self._side):
            if run is None:
                renew_workspace()
            for warm_up in [run] * WARM_UP_PASSES if run is not None else ():
                with KeptProducts() as seen:
                    warm_up()
                self.libraries |= seen.libraries
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        if run is not None:
            self._draws = not torch.equal(before, state_on(self._device))
