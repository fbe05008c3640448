"""Gradients of pools: which steps, that they build, that they are right."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plantune.canonical import Attrs
from plantune.graph.differentiate import differentiate
from plantune.graph.extract import extract
from plantune.graph.types import TensorType
from plantune.kernels.families.pool_grad import FAMILY
from plantune.kernels.family import Candidate
from plantune.space.arch import load_arch

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
    "average, rectangles": alone((1, 5, 9, 7), (1, 5, 5, 3), (3, 2), (2, 3), (1, 1)),
}


def _places(b, shape):
    return b.graph.input("places", TensorType(shape, "int64"))


def places(shape, pooled, **window):
    window = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1), **window}
    return lambda b: b("max_pool2d_grad", b.x(*pooled), _places(b, pooled), shape=shape, **window)


STEPS |= {
    "max": places((2, 24, 5, 7), (2, 24, 3, 4)),
    "max, odd": places((2, 3, 7, 5), (2, 3, 4, 3)),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_it_runs_every_step(step_of, name, dtype):
    step = step_of(STEPS[name], dtype)
    assert FAMILY.why_not_step(step) is None
    assert FAMILY.why_not_config(FAMILY.parts(step), CONFIG, load_arch("sm90")) is None


def test_another_op_is_refused(step_of):
    step = step_of(lambda b: b("relu", b.x(2, 8, 3, 3)), "float16")
    assert "only the gradient of one pool" in FAMILY.why_not_step(step)


@pytest.mark.parametrize("name", ["average", "max"])
def test_it_builds_within_its_limits(step_of, build_within_limits, cuda_arch, name):
    usage = build_within_limits(FAMILY, step_of(STEPS[name], "float16"), CONFIG, cuda_arch)
    assert set(usage) == {"run", "run_unaligned"}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", STEPS)
def test_it_is_right(step_of, assert_legal_configs_right, name, dtype):
    assert_legal_configs_right(FAMILY, step_of(STEPS[name], dtype))


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
    graph = differentiate(extract(pool, TensorType((2, 8, 9, 9))), ["x"])
    forward, backward = graph.nodes
    x = torch.randn(2, 8, 9, 9, device=place).contiguous(memory_format=torch.channels_last)
    y, saved = forward.evaluate([x])
    assert y.is_contiguous()
    dy = torch.randn_like(y).contiguous(memory_format=torch.channels_last)
    (dx,) = backward.evaluate([x, saved, dy])
    exact = x.double().contiguous().requires_grad_()
    pool(exact).backward(dy.double())
    torch.testing.assert_close(dx, exact.grad.float())
