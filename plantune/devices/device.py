"""What measuring and running need of a processor: its memory, its stream, how to wait."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch

from plantune.devices.cuda.capture import capture
from plantune.errors import CannotJudge, CaptureError, PlantuneError

Runnable = Callable[[], object]
# How torch and C++ say that memory ran out; Python says MemoryError.
OUT_OF_MEMORY = ("can't allocate memory", "Cannot allocate memory", "bad_alloc")
COMMON_MEMORY = (0, 0)  # of torch's allocator


class Device:
    """The CPU: what is called is done when it returns."""

    place = torch.device("cpu")
    # Whether work is deployed as a captured graph.
    captures = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.place == other.place

    def __hash__(self) -> int:
        return hash(self.place)

    @property
    def stream(self) -> int:
        """The handle of the stream to which kernels go now."""
        return 0

    def generator(self, seed: int) -> torch.Generator:
        """Draws random numbers on the device."""
        return torch.Generator(self.place).manual_seed(seed)

    def own_stream(self) -> AbstractContextManager[None]:
        """Inside, work goes to a stream that is not the default one."""
        return nullcontext()

    def synchronize(self) -> None:
        """Waits for all work. Raises what went wrong in it."""

    def works(self) -> bool:
        """False after an error from which this process cannot recover."""
        return True

    def held_bytes(self) -> int | None:
        """What torch takes of the GPU's memory for live tensors; None on the CPU (not tracked)."""
        return None

    def peak_bytes(self, call: Runnable) -> int | None:
        """The most that it takes in a call, the memory of captured graphs included."""
        return None

    def give_back_memory(self) -> None:
        """Unmaps free memory: a use of it fails instead of reading stale data."""

    def captured(self, call: Runnable) -> Runnable:
        """The work of one call, to be repeated; raises CaptureError. Needs `own_stream`."""
        return call


CPU = Device()


class Gpu(Device):
    """One CUDA GPU of this machine."""

    captures = True

    def __init__(self, index: int) -> None:
        self.place = torch.device("cuda", index)

    @property
    def stream(self) -> int:
        return torch.cuda.current_stream(self.place).cuda_stream

    @contextmanager
    def own_stream(self) -> Iterator[None]:
        before = torch.cuda.current_stream(self.place)
        if before != torch.cuda.default_stream(self.place):
            yield
            return
        side = torch.cuda.Stream(self.place)
        side.wait_stream(before)
        with torch.cuda.stream(side):
            yield
        before.wait_stream(side)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.place)

    def held_bytes(self) -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(self.place) + self._idle_in_graphs()

    def peak_bytes(self, call: Runnable) -> int:
        self.held_bytes()
        torch.cuda.reset_peak_memory_stats(self.place)
        call()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.place) + self._idle_in_graphs()

    def _idle_in_graphs(self) -> int:
        """What counts as free between two replays of a graph, and serves nothing else."""
        return sum(
            segment["total_size"] - segment["allocated_size"]
            for segment in torch.cuda.memory_snapshot()
            if segment["device"] == self.place.index and segment["segment_pool_id"] != COMMON_MEMORY
        )

    def give_back_memory(self) -> None:
        torch.cuda.empty_cache()

    def works(self) -> bool:
        with suppress(RuntimeError):
            self.synchronize()
            return True
        return False

    def captured(self, call: Runnable) -> Runnable:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.place)
        self.synchronize()
        try:
            capture(graph, call, stream, self.place, torch.cuda.graph_pool_handle())
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CaptureError(f"no graph can be captured: {first_line(error)}") from error
        return _Replay(graph, call)


@dataclass(frozen=True)
class _Replay:
    """A captured call. The graph reads and writes memory that only the call holds."""

    graph: torch.cuda.CUDAGraph
    call: Runnable

    def __call__(self) -> None:
        self.graph.replay()


def first_line(error: BaseException) -> str:
    """What an error says, without the advice that torch adds."""
    return str(error).strip().partition("\n")[0]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on the host or on a GPU."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return any(words in str(error) for words in OUT_OF_MEMORY)


@contextmanager
def framework_alone() -> Iterator[None]:
    """Only the framework's own ops run inside. What they raise on random numbers, such as for a
    matrix that is not positive definite, becomes CannotJudge: no plan is to blame.
    """
    try:
        yield
    except (RuntimeError, IndexError, ValueError) as error:
        if isinstance(error, (PlantuneError, torch.AcceleratorError)) or is_out_of_memory(error):
            raise
        raise CannotJudge(
            "the framework itself fails on random weights and inputs, so no plan can be verified: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error
