"""What happens while a pass is captured, or cannot be."""

from __future__ import annotations

import copy
import dataclasses
import gc
import threading
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from plantune import UnplannedCall, optimize
from plantune.runtime.captured.program_pool import ProgramPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU"),
]


def set_error(model):
    """From now on a call that leaves the plan raises."""
    framework = model._calls.framework
    framework.options = dataclasses.replace(framework.options, fallback="error")


class Normed(nn.Sequential):
    """Moves its statistics in every pass."""

    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())


class TestCapture:
    @pytest.mark.usefixtures("planned")
    def test_beside_a_thread_that_uses_the_gpu(self, small, images, assert_right):
        stop, errors = threading.Event(), []

        def work():
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    while not stop.is_set():
                        # No random numbers: torch refuses them beside any capture.
                        a = torch.ones(300, 300, device="cuda")
                        (a @ a).sum().item()
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            for _ in range(5):
                assert_right(optimize(small, images)(images), small, images)
        finally:
            stop.set()
            thread.join()
        assert errors == []

    @pytest.mark.usefixtures("planned")
    @pytest.mark.parametrize("mode", ["infer", "train"])
    def test_the_first_calls_of_several_threads(self, small, images, mode, assert_right):
        models = [optimize(small, images, mode=mode) for _ in range(4)]
        found, start = [None] * 4, threading.Barrier(4)
        torch.cuda.synchronize()

        def first(index):
            start.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                found[index] = models[index % 3](images).detach()
                torch.cuda.current_stream().synchronize()

        threads = [threading.Thread(target=first, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in found:
            assert_right(result, small, images)

    @pytest.fixture
    def broken(self, monkeypatch):
        """Inside, each capture of a forward pass breaks at its end."""

        @contextmanager
        def run():
            taken = ProgramPool._taken

            def broken(pool):
                instance = taken(pool)
                program = instance.program._program
                forward = program.run_forward

                def run_and_wait():
                    forward()
                    torch.ones(1, device="cuda").item()  # Waits, which no capture allows.

                program.run_forward = run_and_wait
                return instance

            with monkeypatch.context() as patch:
                patch.setattr(ProgramPool, "_taken", broken)
                yield

        return run

    @pytest.mark.parametrize("mode", ["infer", "train"])
    def test_one_that_fails_changes_nothing(self, images, broken, mode, off):
        images = images.float()
        module = Normed().cuda().train(mode == "train")
        model, other = optimize(module, images, mode=mode), copy.deepcopy(module)
        before = torch.cuda.current_stream()
        with broken(), pytest.warns(UnplannedCall, match="the plan cannot run"):
            found = model(images)
        assert torch.cuda.current_stream() == before
        assert torch.randn(5, device="cuda").any()
        torch.cuda.empty_cache()
        assert torch.equal(found, other(images))
        for (name, ours), theirs in zip(model.named_buffers(), other.buffers(), strict=True):
            assert torch.equal(ours, theirs), name
        set_error(model)
        assert off(model(images), other(images)) < 4e-3
        for (name, ours), theirs in zip(model.named_buffers(), other.buffers(), strict=True):
            assert torch.allclose(ours.double(), theirs.double(), rtol=1e-2, atol=1e-3), name

    def test_those_that_fail_keep_no_memory(self, small, images, broken):
        held = []
        for _ in range(3):
            with broken():
                optimize(small, images, fallback="silent")(images)
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            held.append(torch.cuda.memory_reserved())
        assert held[-1] <= held[0]

    @pytest.mark.parametrize("mode", ["infer", "train"])
    def test_a_full_gpu_costs_the_plan_alone(self, small, images, mode, assert_right):
        """Until there is room again."""
        model = optimize(small, images, mode=mode, fallback="silent")
        small(images)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        allowed = torch.cuda.memory_reserved() / torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(allowed)
        try:
            torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
            pytest.fail("it is not full")
        except torch.OutOfMemoryError:
            pass
        try:
            model(images)
        except torch.OutOfMemoryError:
            pass  # Not even the framework has room, which is what eager would say.
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        set_error(model)
        assert_right(model(images), small, images)
