"""Gradients of weights by CUTLASS: what is refused, that they build within limits and run."""

from __future__ import annotations

import pytest

from plantune.base.canonical import Attrs
from plantune.devices.gpus import best_arch
from plantune.kernels.families.implicit_gemm_wgrad import FAMILY
from plantune.kernels.family import Candidate
from plantune.kernels.registry import candidates, why_not
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

from .cutlass_configs import MMA
from .weight_gradients import Gradient

SPLIT = Attrs(MMA, split_k=4)
PARALLEL = Attrs(MMA, split_k=16, split_mode="parallel")
DEEP = Attrs(MMA, stages=3, tile_k=64, split_k=4)
WIDE = Attrs(MMA, tile_m=128, tile_n=128, warp_m=64)


RUN = {
    "layer": (Gradient(5, 64, (16, 16), 64), MMA),
    "split": (Gradient(9, 64, (16, 16), 128, stride=2), SPLIT),
    "two kernels": (Gradient(33, 128, (8, 8), 128), PARALLEL),
    "deep": (Gradient(9, 72, (9, 7), 104), DEEP),
    "wide": (Gradient(3, 128, (8, 8), 256, stride=2), WIDE),
    "few channels": (Gradient(3, 8, (19, 13), 40), MMA),
    "narrow words": (Gradient(3, 6, (9, 8), 10), MMA),
    "1x1": (Gradient(3, 64, (9, 8), 72, 1, padding=0), SPLIT),
    "5x5": (Gradient(2, 16, (13, 10), 24, 5, padding=2), MMA),
    "stride 3": (Gradient(2, 16, (13, 10), 24, stride=3), MMA),
    "dilated": (Gradient(2, 16, (13, 10), 24, dilation=2, padding=2), MMA),
    "no padding": (Gradient(2, 64, (10, 17), 48, padding=0), SPLIT),
    "one pixel": (Gradient(1, 8, (1, 1), 8, 1, padding=0), MMA),
}


@pytest.mark.parametrize("name", RUN)
def test_what_is_to_run_is_legal(step_of, name):
    emit, chosen = RUN[name]
    candidate = Candidate(FAMILY.name, chosen)
    assert why_not(step_of(emit, "float16"), candidate, load_search_space("sm80")) is None


@pytest.mark.parametrize(
    ("emit", "dtype", "reason"),
    [
        (Gradient(groups=2), "float16", "without groups"),
        (Gradient(), "float64", "not float64"),
        (Gradient(c=3), "float16", "both must be even"),
        (Gradient(kernel=1, padding=1), "float16", "is not smaller than the kernel"),
        (Gradient(kernel=33, size=(40, 40)), "float16", "up to 32 rows"),
        (lambda b: b("relu", b.x(2, 8, 4, 4)), "float16", "weight alone"),
    ],
)
def test_other_steps_are_refused(step_of, emit, dtype, reason):
    assert reason in FAMILY.why_not_step(step_of(emit, dtype))


def test_pixels_are_split_and_channels_fill_tiles(step_of):
    parts = FAMILY.parts(step_of(Gradient(5, 64, (16, 16), 128, stride=2), "float16"))
    assert (parts.gemm.m, parts.gemm.n, parts.gemm.channels) == (128, 9 * 64, 5 * 8 * 8)
    large = Attrs(WIDE, warp_n=64)
    assert "128 sums" in FAMILY.why_not_config(parts, large, load_arch("sm80"))
    assert "K is split" in FAMILY.why_not_config(parts, Attrs(MMA, split_k=16), load_arch("sm80"))


def test_a_search_tries_it_on_every_arch(step_of, cuda_arch):
    step = step_of(Gradient(128, 64, (16, 16), 64), "float16")
    assert len(candidates(step, load_search_space(cuda_arch.name), [FAMILY.name])) >= 4


@pytest.mark.gpu
class TestOnTheGpu:
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    @pytest.mark.parametrize("name", RUN)
    def test_it_is_right(self, step_of, assert_right, name, dtype):
        emit, chosen = RUN[name]
        space = load_search_space(best_arch())
        assert_right(step_of(emit, dtype), Candidate(FAMILY.name, chosen), space)


def test_a_guess_is_near_to_what_was_measured(step_of):
    """11.2 us (ResNet-50 at 32x32, 128 images, H200, 2026-11-23)."""
    parts = FAMILY.parts(step_of(Gradient(128, 256, (2, 2), 256), "float16"))
    chosen = Attrs(MMA, stages=3, tile_k=32, tile_m=64, tile_n=128, warp_m=32, warp_n=64)
    assert 8 < FAMILY.estimate_us(parts, chosen, load_arch("sm90")) < 14
