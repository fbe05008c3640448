"""Gradients of pools: which steps, that they build, that they are right."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plantune.base.canonical import Attrs
from plantune.graph.fusions import fusions_named
from plantune.graph.partition import alternatives
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.kernels.families.pool_grad import FAMILY
from plantune.kernels.family import Candidate

from .contract import KERNELS, Contract

CONFIG = Attrs(layout="nhwc", threads=256)


def alone(shape, pooled, kernel=(3, 3), stride=(2, 2), padding=(1, 1), count_padding=True):
    window = {"kernel": kernel, "stride": stride, "padding": padding}
    return lambda b: b(
        "avg_pool2d_grad", b.x(*pooled), shape=shape, count_padding=count_padding, **window
    )


STEPS = {
    "average": alone((2, 16, 5, 7), (2, 16, 3, 4)),
    "average without padding": alone((2, 3, 5, 7), (2, 3, 3, 4), count_padding=False),
    "average of all": alone((2, 8, 7, 7), (2, 8, 1, 1), (7, 7), (7, 7), (0, 0)),
    "average, gaps": alone((2, 8, 9, 9), (2, 8, 3, 3), (2, 2), (3, 3), (0, 0)),
    "average, overlapping": alone((2, 8, 6, 5), (2, 8, 6, 5), stride=(1, 1)),
    "average, many windows": alone((2, 8, 9, 7), (2, 8, 9, 7), (5, 5), (1, 1), (2, 2)),
    "average, rectangles": alone((1, 5, 9, 7), (1, 5, 5, 3), (3, 2), (2, 3), (1, 1)),
}


def _places(b, shape):
    return b.graph.input("places", TensorType(shape, "int64"))


def places(shape, pooled, **window):
    window = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1), **window}
    return lambda b: b("max_pool2d_grad", b.x(*pooled), _places(b, pooled), shape=shape, **window)


def taps(shape, pooled, **window):
    window = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1), **window}

    def emit(b):
        numbers = b.graph.input("taps", TensorType(pooled, "uint8"))
        return b("max_pool2d_taps_grad", b.x(*pooled), numbers, shape=shape, **window)

    return emit


PLAIN = {"kernel": (2, 2), "padding": (0, 0)}
STEPS |= {
    "max": places((2, 24, 5, 7), (2, 24, 3, 4)),
    "max, odd": places((2, 3, 7, 5), (2, 3, 4, 3)),
    "taps": taps((2, 24, 5, 7), (2, 24, 3, 4)),
    "taps, odd": taps((2, 3, 7, 5), (2, 3, 4, 3)),
    "taps, apart": taps((3, 16, 9, 15), (3, 16, 4, 7), **PLAIN),
    "taps, rectangles": taps(
        (2, 12, 9, 7), (2, 12, 10, 3), kernel=(2, 5), stride=(1, 3), padding=(1, 2)
    ),
    "taps, large": taps((1, 8, 11, 9), (1, 8, 4, 4), kernel=(6, 5), stride=(3, 2), padding=(3, 1)),
}


def total(b, value):
    return b("sum_to", value, shape=(1,))


def joined(gradient, shape):
    """Added to another gradient, whose sum is asked for, and masked by what a ReLU made."""

    def emit(b):
        whole = b("add", gradient(b), b.x(*shape))
        return total(b, whole), b("relu_grad", whole, b.x(*shape))

    return emit


def scaled(b):
    dx = STEPS["average"](b)
    masked = b("relu_grad", b("add", b.x(2, 16, 5, 7), dx), b.x(2, 16, 5, 7))
    return dx, total(b, dx), masked, total(b, b("mul", masked, b.w(1)))


def apart(b):
    whole = b("add", STEPS["average"](b), b.x(2, 16, 5, 7))
    return total(b, whole), b("apart_grad", whole, b.x(2, 16, 5, 7), b.w(1))


STEPS |= {
    "average, joined, apart": apart,
    "average, joined": joined(STEPS["average"], (2, 16, 5, 7)),
    "average, joined, odd": joined(STEPS["average without padding"], (2, 3, 5, 7)),
    "average, joined, many": joined(alone((70, 64, 16, 16), (70, 64, 8, 8)), (70, 64, 16, 16)),
    "max, joined": joined(STEPS["max"], (2, 24, 5, 7)),
    "taps, joined": joined(STEPS["taps"], (2, 24, 5, 7)),
    "scaled": scaled,
    "of each image": lambda b: b("mul", STEPS["average"](b), b.x(2, 16, 1, 1)),
    "sum alone": lambda b: total(b, STEPS["average"](b)),
}


REFUSED = {
    "sums of channels": (
        lambda b: b("sum_to", STEPS["average"](b), shape=(16, 1, 1)),
        "only the sum of all elements",
    ),
    "a sum that is used": (
        lambda b: b("mul", dx := STEPS["average"](b), total(b, dx)),
        "a sum is read inside of it",
    ),
    "windows far apart": (
        alone((1, 8, 9, 27), (1, 8, 3, 3), (3, 9), (3, 9), (0, 0)),
        "8 pixels at most, windows are 9 apart",
    ),
    "another op": (lambda b: b("mean", STEPS["average"](b), dims=(2, 3), keepdim=True), "mean at"),
    "another start": (
        lambda b: b("relu", b.x(2, 8, 3, 3)),
        "does not start with the gradient of a pool",
    ),
}


OTHERS = ("max, odd", "average, many windows", "average of all", "scaled", "of each image")


class TestContract(Contract):
    family, steps, refused = FAMILY, STEPS, REFUSED
    builds = ("average", "max", "average, joined", "taps")
    builds_chosen = tuple((STEPS[name], CONFIG) for name in OTHERS)
    config = CONFIG

    def check_usage(self, step, config, usage):
        assert set(usage) >= KERNELS


def test_a_shipped_fusion_offers_the_whole(graph_of):
    graph = graph_of(STEPS["average, joined"], "float16")
    offered = alternatives(graph, fusions_named("pool_grad"))
    (whole,) = [step for step in offered if len(step.nodes) == len(graph.nodes)]
    assert FAMILY.why_not_step(whole) is None


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("name", STEPS)
def test_so_is_the_frameworks_in_every_layout(step_of, assert_right, gpu_space, name, layout):
    step = step_of(STEPS[name], "float16")
    assert_right(step, Candidate("framework", Attrs(layout=layout)), gpu_space)


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_pools_that_torch_alone_knows_compute_in_rows(place):
    """There torch's gradient is right on a GPU, too."""
    pool = nn.AvgPool2d(3, 2, 1, ceil_mode=True)
    graph = differentiate(extract(pool, TensorType((2, 8, 10, 10))), ["x"])
    forward, backward = graph.nodes
    x = torch.randn(2, 8, 10, 10, device=place).contiguous(memory_format=torch.channels_last)
    y, saved = forward.evaluate([x])
    assert y.is_contiguous()
    dy = torch.randn_like(y).contiguous(memory_format=torch.channels_last)
    (dx,) = backward.evaluate([x, saved, dy])
    exact = x.double().contiguous().requires_grad_()
    pool(exact).backward(dy.double())
    torch.testing.assert_close(dx, exact.grad.float())
