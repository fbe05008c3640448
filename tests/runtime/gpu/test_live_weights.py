"""Weights are read where they lie, in stream order: whatever wrote them, the next pass is right."""

from __future__ import annotations

import copy
import gc
import random

import pytest
import torch
from torch import nn

from plantune import load_model, optimize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU"),
]


@pytest.fixture(params=["as torch has them", "channels_last"])
def strides(request):
    return request.param


@pytest.fixture
def model(small, images, strides, tuned):
    """Our own kernels, over filters that they read as they are, or that a pass packs."""
    module = small.eval()
    if strides == "channels_last":
        module.to(memory_format=torch.channels_last)
    model = tuned(module, images, plan="hand")
    with torch.no_grad():
        model(images)
    assert model.last_call().how == "captured"
    return model


@pytest.fixture
def x(images):
    return images


def assert_follows(model, x, assert_right):
    with torch.no_grad():
        assert_right(model(x), model.reference, x)


@torch.no_grad()
def scaled(model, factor=-0.9):
    for parameter in model.parameters():
        parameter.data.mul_(factor)


class Adam:
    """A captured optimizer: a graph writes the weights."""

    def __init__(self, model):
        self._parameters = list(model.parameters())
        self._steps = [torch.randn_like(p) * 0.05 for p in self._parameters]
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.no_grad(), torch.cuda.graph(self._graph):
            torch._foreach_add_(self._parameters, self._steps)

    def step(self):
        self._graph.replay()


class TestWritten:
    """Each was wrong by two thirds of the output's size once."""

    def test_by_a_replayed_graph(self, model, x, assert_right):
        optimizer = Adam(model)
        for _ in range(3):
            optimizer.step()
            assert_follows(model, x, assert_right)

    def test_on_another_stream_that_was_waited_for(self, model, x, assert_right):
        side = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(side):
            torch.cuda._sleep(10_000_000)
            for parameter in model.parameters():
                parameter.mul_(1.3)
        torch.cuda.synchronize()
        assert_follows(model, x, assert_right)
        with torch.no_grad(), torch.cuda.stream(side):
            torch.cuda._sleep(10_000_000)
            for parameter in model.parameters():
                parameter.mul_(-0.8)
        torch.cuda.current_stream().wait_stream(side)
        assert_follows(model, x, assert_right)

    def test_through_data_and_storages(self, model, x, assert_right):
        scaled(model)
        assert_follows(model, x, assert_right)
        weight = model.layers[1][0].conv1.weight
        weight.untyped_storage().copy_((weight.detach() * -2).untyped_storage())
        assert_follows(model, x, assert_right)

    def test_by_foreach_and_fused_optimizers(self, model, x, assert_right):
        for options in ({"foreach": True}, {"fused": True}, {"capturable": True}):
            # In 16 bits a smaller eps is none.
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3, **options)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            assert_follows(model, x, assert_right)

    def test_in_any_order(self, model, x, assert_right):
        ways = [
            lambda: scaled(model, random.uniform(0.8, 1.2)),
            lambda: model.load_state_dict(copy.deepcopy(model.state_dict())),
            lambda: model.load_state_dict(
                {k: v * 1.1 for k, v in model.state_dict().items()}, assign=True
            ),
            lambda: setattr(conv, "weight", nn.Parameter(conv.weight * 2)),
            lambda: nn.utils.vector_to_parameters(
                torch.cat([p.flatten() for p in model.parameters()]) * 0.9, model.parameters()
            ),
            lambda: torch._foreach_mul_(list(model.parameters()), 1.05),
        ]
        conv = model.layers[0][0].conv1
        random.seed(0)
        for _ in range(40):
            with torch.no_grad():
                random.choice(ways)()
                largest = max(float(p.abs().max()) for p in model.parameters())
                if largest > 4 or largest < 0.1:
                    scaled(model, 1 / largest)
            x.normal_()
            assert_follows(model, x, assert_right)


class TestInACapture:
    """The caller's own graph holds our call."""

    def test_weights_that_change_between_replays(self, model, x, assert_right):
        graph, static = torch.cuda.CUDAGraph(), x.clone()
        with torch.no_grad(), torch.cuda.graph(graph):
            y = model(static)
        for _ in range(3):
            scaled(model)
            static.normal_()
            graph.replay()
            assert_right(y, model.reference, static)

    def test_an_update_in_the_same_capture(self, model, x, assert_right):
        graph, static = torch.cuda.CUDAGraph(), x.clone()
        parameters = list(model.parameters())
        with torch.no_grad(), torch.cuda.graph(graph):
            torch._foreach_mul_(parameters, -0.95)
            y = model(static)
        for _ in range(4):
            graph.replay()
            assert_right(y, model.reference, static)

    def test_beside_ordinary_calls(self, model, x):
        """An instance that a capture used is nobody else's."""
        graph, static = torch.cuda.CUDAGraph(), x.clone()
        with torch.no_grad(), torch.cuda.graph(graph):
            y = model(static)
        graph.replay()
        torch.cuda.synchronize()
        expected, other = y.clone(), torch.randn_like(x)
        with torch.no_grad():
            wanted = model(other).clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        for _ in range(50):
            with torch.cuda.stream(side):
                graph.replay()
            with torch.no_grad():
                found = model(other)
            torch.cuda.synchronize()
            assert torch.equal(y, expected)
            assert torch.equal(found, wanted)

    def test_when_the_module_is_gone(self, model, x):
        graph, static = torch.cuda.CUDAGraph(), x.clone()
        kept = list(model.parameters())  # as the caller of any captured module must
        with torch.no_grad(), torch.cuda.graph(graph):
            y = model(static)
        graph.replay()
        torch.cuda.synchronize()
        expected = y.clone()
        del model
        gc.collect()
        torch.cuda.empty_cache()
        filled = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, expected)
        assert kept
        assert filled


class TestFrozen:
    def test_what_changes_counts_after_a_refresh(self, small, images, assert_right):
        model = optimize(small.eval(), images, frozen=True)
        assert_follows(model, images, assert_right)
        scaled(model)
        model.refresh(weights_only=True)
        assert_follows(model, images, assert_right)


class TestAddresses:
    def test_no_capture_and_no_growth_after_the_third_call(self, model, x, assert_right):
        with torch.no_grad():
            for _ in range(3):
                model(x)
            before = model.stats()
            inputs = [torch.randn_like(x) for _ in range(64)]
            for _ in range(5):
                for each in inputs:
                    model(each)
                scaled(model, 1.001)
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated()
            for _ in range(2000):
                model(random.choice(inputs))
            torch.cuda.synchronize()
        after = model.stats()
        assert (after.captures, after.held_bytes) == (before.captures, before.held_bytes)
        assert torch.cuda.memory_allocated() <= held
        for each in inputs[:5]:
            assert_follows(model, each, assert_right)

    def test_an_output_fed_back(self, images):
        module = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()).cuda().half().eval()
        model, x = optimize(module, images), images.clone()
        with torch.no_grad():
            for _ in range(200):
                y = model(x)
                expected = module(x)
                assert torch.allclose(y, expected, rtol=2e-2, atol=1e-3)
                x = y / y.abs().max().clamp(min=1e-3)

    @pytest.mark.parametrize("where", ["misaligned", "sliced", "expanded", "channels_last"])
    def test_inputs_that_lie_elsewhere(self, model, x, where, assert_right):
        given = {
            "misaligned": lambda: torch.randn(x.numel() + 1, device="cuda").half()[1:].view_as(x),
            "sliced": lambda: torch.randn(2, 3, 64, 128, device="cuda").half()[..., ::2],
            "expanded": lambda: torch.randn(1, 3, 64, 64, device="cuda").half().expand_as(x),
            "channels_last": lambda: x.to(memory_format=torch.channels_last),
        }[where]()
        for each in (given, x, given, x):
            assert_follows(model, each, assert_right)


def test_load_model_has_filters_as_kernels_read_them():
    model = load_model("se_resnet9_fixup", batch=2, fallback="silent")
    filters = [p for p in model.parameters() if p.dim() == 4 and p[0, 0].numel() > 1]
    assert filters
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in filters)
