"""Which processor serves an arch, without one of its GPUs here."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch

from plantune.devices import gpus as gpus_module
from plantune.devices.cuda import capture
from plantune.devices.device import CPU, Gpu, first_line, framework_alone
from plantune.devices.gpus import LocalGpu, best_arch, device_for, later_gpu
from plantune.errors import CannotJudge, CaptureError, UnsupportedDevice
from plantune.space.arch import load_arch

from ..fake_gpu import replace_torchs

H200 = LocalGpu(0, "NVIDIA H200", (9, 0), 140 << 30)
RTX = LocalGpu(1, "NVIDIA GeForce RTX 4090", (8, 9), 24 << 30)
PASCAL = LocalGpu(2, "Tesla P100", (6, 0), 16 << 30)


@pytest.fixture
def here(monkeypatch):
    def put(*gpus):
        monkeypatch.setattr(gpus_module, "gpus_here", lambda: gpus)

    return put


def test_the_cpu_is_always_here(here):
    here(H200)
    found = device_for(load_arch("cpu"))
    assert found is CPU
    assert (found.place, found.stream, found.captures) == (torch.device("cpu"), 0, False)
    with found.own_stream():
        found.synchronize()
    assert found.works()


def test_a_call_on_the_cpu_is_repeated_as_it_is():
    called = []
    repeated = CPU.captured(lambda: called.append(1))
    assert called == []
    repeated()
    repeated()
    assert called == [1, 1]


def test_a_gpu_serves_exactly_its_arch(here):
    here(RTX, H200)
    assert device_for(load_arch("sm90")) == Gpu(0)
    assert device_for(load_arch("sm89")).place == torch.device("cuda", 1)
    with pytest.raises(
        UnsupportedDevice, match=r"sm86 needs a GPU of compute capability 8\.6"
    ) as e:
        device_for(load_arch("sm86"))
    assert "here is NVIDIA GeForce RTX 4090 (sm89) and NVIDIA H200 (sm90)" in str(e.value)


def test_without_a_gpu_it_says_so(here):
    here()
    with pytest.raises(UnsupportedDevice, match="torch sees no CUDA GPU here"):
        device_for(load_arch("sm90"))


def test_a_later_gpu_runs_what_is_portable(here):
    here(PASCAL, RTX, H200)
    assert later_gpu(load_arch("sm80")) == Gpu(1)
    assert later_gpu(load_arch("sm89")) == Gpu(0)
    assert later_gpu(load_arch("sm90")) is None
    assert later_gpu(load_arch("cpu")) is None
    here()
    assert later_gpu(load_arch("sm70")) is None


def test_the_best_arch_is_that_of_the_first_known_gpu(here):
    here(PASCAL, RTX, H200)
    assert best_arch() == "sm89"
    here(PASCAL)
    assert best_arch() == "cpu"
    here()
    assert best_arch() == "cpu"


def test_equal_devices_are_one_key():
    assert {Gpu(0): 1}[Gpu(0)] == 1
    assert Gpu(0) != Gpu(1)
    assert Gpu(0) != CPU


def test_random_numbers_repeat():
    draws = [torch.rand(3, generator=CPU.generator(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_advice_of_torch_is_left_out():
    error = RuntimeError("CUDA error: an illegal memory access\nCUDA kernel errors might be ...")
    assert first_line(error) == "CUDA error: an illegal memory access"


@pytest.fixture
def gpu(monkeypatch):
    """One whose memory is the CPU's; `streams` are those that were made current."""
    found, current = Gpu(0), object()
    found.place, found.streams = torch.device("cpu"), []
    replace_torchs(
        monkeypatch,
        current_stream=lambda device: current,
        set_stream=found.streams.append,
        stream=lambda stream: nullcontext(),
    )
    for name in ("_end_allocation", "_release_pool"):  # torch's own, in its CUDA build
        monkeypatch.setattr(capture, name, lambda index, pool: None)
    return found


def test_a_captured_call_keeps_what_its_graph_reads(gpu):
    """The graph knows addresses alone: memory that only the call holds must not be given back."""

    class Held:
        pass

    held = Held()
    alive = weakref.ref(held)
    replay = gpu.captured(lambda memory=held: memory)
    del held
    replay()
    assert alive() is not None


def test_nothing_is_collected_while_it_is_captured(gpu):
    seen = []
    gpu.captured(lambda: seen.append(gc.isenabled()))
    assert seen == [False]
    assert gc.isenabled()


def test_what_cannot_be_captured_says_why(gpu, is_free):
    def call():
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nadvice")

    with pytest.raises(
        CaptureError, match="captured: CUDA error: operation not permitted"
    ) as error:
        gpu.captured(call)
    assert "advice" not in str(error.value)
    assert gc.isenabled()
    assert gpu.streams[-1] is torch.cuda.current_stream(gpu.place)
    assert is_free(capture.one_capture)


def test_memory_that_runs_out_is_not_the_fault_of_capturing(gpu):
    def call():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        gpu.captured(call)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
class TestMemory:
    """Counted in the way of a bench: what a call takes beyond what was held before it was made."""

    MIB = 1 << 20

    @pytest.fixture
    def gpu(self):
        found = Gpu(0)
        found.held_bytes()
        return found

    def grown(self, gpu, make):
        held = gpu.held_bytes()
        call = make()
        call()
        return gpu.peak_bytes(call) - held

    def used(self, mib):
        return torch.zeros(mib << 20, dtype=torch.uint8, device="cuda")

    def test_what_lives_and_what_a_call_takes_for_itself(self, gpu):
        def make():
            weights = self.used(24)
            return lambda: self.used(8).add_(weights[0])

        assert self.grown(gpu, make) == 32 * self.MIB

    def test_what_is_idle_in_a_graph(self, gpu):
        def make():
            with gpu.own_stream():
                return gpu.captured(lambda: self.used(64).add_(1))

        assert 64 * self.MIB <= self.grown(gpu, make) <= 96 * self.MIB

    def test_room_in_the_segments_of_others_is_not_free_of_charge(self, gpu):
        others = [self.used(4) for _ in range(8)]
        del others[::2]

        def make():
            weights = self.used(4)
            return lambda: weights.add_(1)

        assert self.grown(gpu, make) == 4 * self.MIB


@pytest.mark.parametrize(
    "error", [RuntimeError("not positive-definite\nadvice"), IndexError("index"), ValueError("no")]
)
def test_what_the_frameworks_own_ops_refuse_cannot_be_judged(error):
    name = type(error).__name__
    with (
        pytest.raises(CannotJudge, match=f"the framework itself fails on random .* {name}: "),
        framework_alone(),
    ):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        KeyError("a fault of plantune"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("CUDA error: misaligned address"),
        UnsupportedDevice("no GPU"),
    ],
)
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error)) as raised, framework_alone():
        raise error
    assert raised.value is error
