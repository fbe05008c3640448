"""Gradients of images by CUTLASS: what is refused, how filters are turned, that they run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from plantune.base.canonical import Attrs
from plantune.kernels.families.implicit_gemm_dgrad import FAMILY, as_forward, turned
from plantune.kernels.family import Candidate
from plantune.kernels.registry import candidates
from plantune.space.search_space import load_search_space

from .contract import AnyGpu
from .cutlass_configs import MMA
from .image_gradients import MASKED, POOLED, Gradient

SIMT = Attrs(MMA, math="simt", tile_m=128, tile_n=128, tile_k=8, warp_m=32, warp_n=64)
SPLIT = Attrs(MMA, split_k=2)
PARALLEL = Attrs(SPLIT, split_mode="parallel")
RUN = {
    "layer": (Gradient(3, 64, (16, 16), 64), MMA),
    "deep": (Gradient(7, 128, (4, 4), 512), SPLIT),
    "two kernels": (Gradient(2, 72, (9, 7), 104), PARALLEL),
    "added": (Gradient(3, 40, (19, 13), 72, parts=("add",)), MMA),
    "no padding": (Gradient(2, 64, (10, 17), 48, padding=0), MMA),
    "much padding": (Gradient(2, 64, (9, 8), 32, padding=2), MMA),
    "1x1": (Gradient(3, 64, (9, 8), 72, 1), MMA),
    "4x4": (Gradient(2, 24, (9, 7), 64, kernel=4, padding=1), MMA),
    "5x5": (Gradient(2, 8, (13, 10), 16, 5), MMA),
    "one pixel": (Gradient(1, 8, (1, 1), 8), MMA),
}


def test_a_filter_is_turned_around():
    """The gradient of an image is the convolution of the result's with such a filter."""
    x = torch.randn(2, 5, 9, 7, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 5, 3, 2, dtype=torch.float64)
    y = F.conv2d(x, w, padding=(1, 0))
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    filters = turned(w).permute(0, 3, 1, 2)
    torch.testing.assert_close(F.conv2d(dy, filters, padding=(1, 1)), dx)


def test_a_step_is_read_as_a_convolution(step_of):
    step = step_of(Gradient(2, 24, (9, 7), 64, kernel=4, padding=1, parts=("add",)), "float16")
    forward = as_forward(step)
    assert forward.ops == ("conv2d", "add")
    assert forward.nodes[0].attrs["padding"] == (2, 2)
    assert forward.types[forward.nodes[0].inputs[1]].shape == (24, 64, 4, 4)
    parts = FAMILY.parts(step)
    assert (parts.gemm.m, parts.gemm.n, parts.gemm.channels) == (2 * 9 * 7, 24, 64)


REFUSED = {
    "far steps": (Gradient(stride=2), "with stride 1, got (2, 2)"),
    "groups": (Gradient(groups=2), "without groups and dilation"),
    "much padding": (Gradient(kernel=1, padding=1), "is not smaller than the kernel (1, 1)"),
    "a mask": (Gradient(parts=MASKED), "relu_grad"),
    "a sum": (Gradient(parts=("all",)), "sum_to"),
    "a pool": (Gradient(parts=POOLED, pool=(2, 1)), "does not read 'conv2d_dgrad'"),
}


class TestContract(AnyGpu):
    family, chosen, refused = FAMILY, RUN, REFUSED


def test_a_search_tries_it_on_every_arch(step_of, cuda_arch):
    step = step_of(Gradient(128, 64, (16, 16), 64), "float16")
    assert len(candidates(step, load_search_space(cuda_arch.name), [FAMILY.name])) >= 4


@pytest.mark.gpu
def test_it_is_right_in_float32(step_of, assert_right, gpu_space):
    step = step_of(Gradient(3, 72, (19, 13), 40, parts=("add",)), "float32")
    assert_right(step, Candidate(FAMILY.name, SIMT), gpu_space)
