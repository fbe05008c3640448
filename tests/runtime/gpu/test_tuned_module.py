"""Tuned modules on a GPU: a captured graph that follows inputs, weights, streams and threads."""

from __future__ import annotations

import copy
import gc
import threading
from collections import Counter

import pytest
import torch

from plantune import load_model, optimize
from plantune.devices.machine import arch_of
from plantune.models.se_resnet9 import SEResNet9Fixup
from plantune.plans.guess import hand_plan
from plantune.runtime.captured.captured_program import CapturedProgram
from plantune.space.search_space import load_search_space

pytestmark = pytest.mark.gpu

# Enough for whatever a module does only after some calls.
MANY = 16
HALVES = (torch.float16, torch.bfloat16)
# Beside twice the framework's own error: some roundings of the largest value.
ROUNDINGS = 8


def here():
    return arch_of(torch.device("cuda"))


@pytest.fixture(params=HALVES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture
def small(randomise, dtype):
    return randomise(SEResNet9Fixup(3, base_planes=16)).to("cuda", dtype).eval()


@pytest.fixture
def images(dtype):
    return torch.randn(2, 3, 64, 64, device="cuda", dtype=dtype)


@torch.no_grad()
def assert_follows(model, x):
    """The model's output is the reference's, by the bound that every kernel is held to."""
    exact = copy.deepcopy(model.reference).double()(x.double())
    theirs = (model.reference(x).double() - exact).norm() / exact.norm()
    ours = (model(x).double() - exact).norm() / exact.norm()
    assert ours <= 2 * theirs + ROUNDINGS * torch.finfo(x.dtype).eps, f"{ours:.3g}, {theirs:.3g}"


class TestPasses:
    @pytest.mark.parametrize("channels", [1, 3, 11, 14])
    @pytest.mark.parametrize("batch", [1, 7, 64])
    def test_sizes(self, randomise, tuned, dtype, channels, batch):
        module = randomise(SEResNet9Fixup(channels)).to("cuda", dtype)
        x = torch.randn(batch, channels, 64, 64, device="cuda", dtype=dtype)
        assert_follows(tuned(module, x), x)

    def test_it_is_captured(self, small, images):
        model = optimize(small, images)
        model(images)
        with model.pool().lend() as instance:
            assert isinstance(instance.program, CapturedProgram)

    def test_a_thousand_replays_with_other_inputs_and_weights(self, small, images):
        model = optimize(small, images)
        parameters = list(model.parameters())
        for turn in range(1000):
            images.normal_()
            if turn % 3 == 0:
                with torch.no_grad():
                    parameters[turn % len(parameters)].mul_(1.01)
            if turn % 50 == 0:
                assert_follows(model, images)
            else:
                model(images)

    def test_gradients(self, small, images):
        """Each for itself, its errors pooled over many draws as a part of their pooled size: of one
        draw luck decides, and a scalar's gradient may be next to nothing there. Of 16 draws one
        scalar's was 2.3 times eager's: a few inputs of ReLUs are nearly zero.
        """
        model = optimize(small, images, mode="train")
        dy = torch.randn_like(small(images)) / 8
        wide = copy.deepcopy(small).double()
        ours, theirs, sizes = Counter(), Counter(), Counter()
        for _ in range(128):
            images.normal_()
            exact = gradients(wide, images.double(), dy.double())
            sizes.update({name: squared(wanted) for name, wanted in exact.items()})
            for module, errors in ((model, ours), (small, theirs)):
                for name, gradient in gradients(module, images, dy).items():
                    errors[name] += squared(gradient.double() - exact[name])
        rounding = torch.finfo(images.dtype).eps
        for name, size in sizes.items():
            mine, their = ((errors[name] / size) ** 0.5 for errors in (ours, theirs))
            assert mine <= 2 * their + rounding, name


def squared(x):
    return float(x.norm()) ** 2


def gradients(module, x, dy):
    module.zero_grad()
    module(x).backward(dy)
    return {name: p.grad.clone() for name, p in module.named_parameters()}


class TestCallers:
    def test_results_are_the_callers(self, small, images):
        model = optimize(small, images)
        first = model(images)
        kept = first.clone()
        second = model(torch.randn_like(images))
        assert torch.equal(first, kept)
        assert first.data_ptr() != second.data_ptr()

    def test_an_input_freed_after_the_call(self, small, images):
        model = optimize(small, images)
        expected = model(images)
        copied = images.clone()
        result = model(copied)
        del copied
        torch.randn(2, 3, 64, 64, device="cuda").fill_(float("nan"))
        assert torch.equal(result, expected)

    def test_other_streams(self, small, images):
        model = optimize(small, images)
        inputs = [torch.randn_like(images) for _ in range(8)]
        expected = [model(x) for x in inputs]
        streams = [torch.cuda.Stream() for _ in inputs]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        results = []
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                results.append(model(x))
        torch.cuda.synchronize()
        assert all(map(torch.equal, results, expected))

    def test_two_threads(self, small, images):
        model = optimize(small, images)
        inputs = [torch.randn_like(images) for _ in range(2)]
        expected = [model(x) for x in inputs]
        wrong = []

        def call(index):
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    result = model(inputs[index])
                    torch.cuda.current_stream().synchronize()
                    if not torch.equal(result, expected[index]):
                        wrong.append(index)

        threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    def test_inside_of_a_capture_of_the_callers(self, small, images):
        model = optimize(small, images)
        model(images)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = model(images)
        images.normal_()
        graph.replay()
        assert torch.equal(result, model(images))

    def test_a_collection_while_graphs_live(self, small, images):
        model = optimize(small, images)
        expected = model(images)
        other = optimize(small, images)
        other(images)
        del other
        gc.collect()
        torch.cuda.empty_cache()
        assert torch.equal(model(images), expected)


class TestSameAddress:
    """From some repetition on, a graph reads the caller's input where it lies."""

    @pytest.mark.parametrize("plan", ["framework", "hand"])
    def test_new_contents_count(self, small, images, plan):
        model = optimize(small, images)
        if plan == "hand":
            by_hand = hand_plan(model.pool().graph, load_search_space(here()), network="test")
            model = optimize(small, images, plan=by_hand)
        for _ in range(2 * MANY):
            images.normal_()
            assert_follows(model, images)
            kept = model(images)
            expected = kept.clone()
            model(torch.randn_like(images))
            assert torch.equal(kept, expected)
            for _ in range(3):
                model(images)

    def test_results_that_are_kept_stay(self, small, images, tuned):
        """Graphs write to the memory of a result that nobody has any more."""
        model, kept = tuned(small, images, plan="hand"), []
        for turn in range(10 * MANY):
            images.normal_()
            y = model(images)
            kept = [*kept[-(turn % 3) :], (y, y.clone())]
            assert all(torch.equal(*pair) for pair in kept)
            if turn % MANY == 0:
                assert_follows(model, images)

    def test_addresses_in_turns(self, small, images):
        model = optimize(small, images)
        inputs = [torch.randn_like(images) for _ in range(6)]
        expected = [model(x) for x in inputs]
        for x, result in zip(inputs, expected, strict=True):
            for _ in range(MANY + 3):
                assert torch.equal(model(x), result)
        assert all(torch.equal(model(x), y) for x, y in zip(inputs, expected, strict=True))

    def test_memory_that_another_layout_has_now(self, small):
        memory = torch.randn(2 * 3 * 64 * 64, device="cuda").to(next(small.parameters()).dtype)
        rows = memory.view(2, 3, 64, 64)
        channels_last = memory.view(2, 64, 64, 3).permute(0, 3, 1, 2)
        model = optimize(small, rows)
        for x in (rows, channels_last) * 2:
            for _ in range(MANY + 3):
                model(x)
            assert_follows(model, x)

    def test_changed_weights_count(self, small, images):
        model = optimize(small, images)
        for _ in range(MANY + 3):
            model(images)
        with torch.no_grad():
            model.layers[1][0].conv1.weight.mul_(1.5)
        assert_follows(model, images)
        conv = model.layers[1][0].conv1
        conv.weight = torch.nn.Parameter(torch.randn_like(conv.weight) * 0.1)
        assert_follows(model, images)


class TestWeights:
    def test_loaded(self, small, images):
        model = optimize(small, images)
        model(images)
        other = {name: torch.randn_like(t) * 0.1 for name, t in model.state_dict().items()}
        model.load_state_dict(other)
        assert_follows(model, images)

    def test_replaced(self, small, images):
        model = optimize(small, images)
        model(images)
        conv = model.layers[1][0].conv1
        conv.weight = torch.nn.Parameter(torch.randn_like(conv.weight) * 0.1)
        assert_follows(model, images)

    def test_in_channels_last(self, small, images):
        model = optimize(small.to(memory_format=torch.channels_last), images)
        for _ in range(2):
            assert_follows(model, images)
            with torch.no_grad():
                model.layers[1][0].conv2.weight.mul_(1.5)

    def test_moved_to_the_cpu(self, small, images):
        model = optimize(small, images, fallback="silent")
        model(images)
        model.cpu()
        x = images.cpu()
        with torch.no_grad():
            assert torch.equal(model(x), model.reference(x))


class TestLoading:
    @pytest.mark.filterwarnings("ignore")
    def test_the_gpu_and_half_precision_are_the_default(self):
        model = load_model("se_resnet9_fixup", batch=2)
        weight = next(model.parameters())
        assert (weight.device.type, weight.dtype) == ("cuda", torch.float16)

    @pytest.mark.filterwarnings("ignore")
    def test_the_ragged_last_batch(self, images):
        model = load_model("se_resnet9_fixup", batch=2, dtype=images.dtype, fallback="silent")
        assert_follows(model, images[:1])

    def test_out_of_memory_in_capture_falls_back(self, small, images, monkeypatch):
        def full(*_, **__):
            raise torch.OutOfMemoryError("CUDA out of memory")

        model = optimize(small, images)
        monkeypatch.setattr(CapturedProgram, "replay", full)
        with torch.no_grad(), pytest.warns(UserWarning, match="out of memory"):
            assert torch.equal(model(images), model.reference(images))
        monkeypatch.undo()
        assert_follows(model, images)

    def test_a_failing_capture_leaves_a_sane_state(self, small, images, monkeypatch):
        model = optimize(small, images, fallback="silent")
        replaced = model.pool().lend()
        program = replaced.instance.program._program
        run = program.run_forward

        def broken():
            run()
            images.sum().item()  # Waits for the GPU, which no capture allows.

        monkeypatch.setattr(program, "run_forward", broken)
        replaced.release()
        with torch.no_grad():
            assert torch.equal(model(images), model.reference(images))
        monkeypatch.undo()
        assert_follows(model, images)
