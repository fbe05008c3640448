"""How work becomes a CUDA graph, and what is mended where that breaks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from ctypes import c_void_p
from dataclasses import dataclass
from functools import cached_property

import torch

from plantune.cuda import driver
from plantune.cuda.patches import Executable
from plantune.cuda.recording import Recording, recorded
from plantune.device import no_collection
from plantune.runtime.streams import stream_for
from plantune.runtime.torch_internals import current_gpu, raw_stream

# Libraries choose algorithms and take workspaces in their first calls, which cannot be captured.
WARM_UP_PASSES = 2
# A caller who keeps each output until the next one comes has two in turns; inputs likewise. To tell
# one kernel of another address before the launch takes 1.6 us on the host (H200, 2026-11-22).
EXECUTABLES = 4
# Where torch hands out the graph that it captured.
_KEPT = {"keep_graph": True} if hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec") else {}
# torch captures one graph at a time in a process.
_one_capture = threading.Lock()
# Private, but what torch's own captures end with.
_end_allocation = getattr(torch._C, "_cuda_endAllocateToPool", lambda index, pool: None)
_release_pool = getattr(torch._C, "_cuda_releasePool", lambda index, pool: None)


@dataclass(frozen=True)
class Recorded:
    """A graph, and the launches of our own kernels in it."""

    graph: torch.cuda.CUDAGraph
    launches: Recording

    @cached_property
    def executables(self) -> tuple[Executable, ...]:
        """Several of one graph, so that not each call with memory elsewhere must change one; none
        where torch does not hand out the graph.
        """
        first = self.graph.raw_cuda_graph_exec() if _KEPT else None
        if first is None:
            return ()
        graph, stream = self.graph.raw_cuda_graph(), raw_stream(current_gpu())
        others = [driver.instantiate(graph, stream) for _ in range(EXECUTABLES - 1)]
        for other in others:
            weakref.finalize(self, driver.destroy_executable, other).atexit = False
        return tuple(Executable(handle, self.launches) for handle in (first, *others))

    @cached_property
    def launch(self) -> Callable[[c_void_p], None]:
        """What launches it on a stream. For graphs without random ops: 2.6 us instead of the 3.9
        of a replay (H200, 2026-11-22).
        """
        first = self.graph.raw_cuda_graph_exec() if _KEPT else None
        if first is None:
            graph = self.graph  # not `self`: a cycle would keep its memory
            return lambda stream: graph.replay()
        return driver.graph_launcher(first)


class Recorder:
    """Captures on a stream of its own; its graphs share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = stream_for(self, device)
        self._pool = torch.cuda.graph_pool_handle()

    def graph(self, run: Callable[[], None], first: bool) -> Recorded:
        """What `run` does, after some runs to warm up; `first` if there is no other graph by now.

        Raises what that raises. Then, too, torch is as it was before.
        """
        current = torch.cuda.current_stream(self._device)
        if first:
            # torch captures nothing into a pool whose graphs are all gone.
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph(**_KEPT)
        try:
            with _one_capture, no_collection(), torch.cuda.device(self._device):
                launches = self._capture(graph, run, current)
        except BaseException:
            with torch.cuda.device(self._device):
                self._recover(current)
            raise
        finally:
            current.wait_stream(self._side)
        return Recorded(graph, launches)

    def _capture(
        self, graph: torch.cuda.CUDAGraph, run: Callable[[], None], current: torch.cuda.Stream
    ) -> Recording:
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            for _ in range(WARM_UP_PASSES):
                run()
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            # torch ends the process where a capture finds no room for the state of random numbers.
            # This raises instead, and leaves the room; torch.cuda.graph would give it back.
            torch.empty(1 << 14, dtype=torch.uint8, device=self._device)
            # Other threads may go on calling CUDA while this one captures.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                with recorded() as launches:
                    run()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
            if _KEPT:
                graph.instantiate()
        return launches

    def _recover(self, current: torch.cuda.Stream) -> None:
        """After a capture that broke, torch is still on its stream, allocates for it, keeps that
        memory, and draws no random number outside of it. The last is mended by a capture that
        succeeds.
        """
        torch.cuda.set_stream(current)
        try:
            _end_allocation(self._device.index, self._pool)
            _release_pool(self._device.index, self._pool)
        except RuntimeError:
            return  # It had not begun, or it ended.
        # On the side: next to the spare tensor that capture has room for its random numbers.
        torch.cuda.set_stream(self._side)
        with suppress(RuntimeError), _one_capture:
            spare = torch.zeros(1, device=self._device)
            with torch.cuda.graph(
                torch.cuda.CUDAGraph(), stream=self._side, capture_error_mode="thread_local"
            ):
                spare.add_(1)
        torch.cuda.set_stream(current)
