"""Gradients of weights by CUTLASS: what is refused, that they build within limits and run."""

from __future__ import annotations

from plantune.base.canonical import Attrs
from plantune.kernels.families.implicit_gemm_wgrad import FAMILY
from plantune.kernels.registry import candidates
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

from .contract import AnyGpu
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


REFUSED = {
    "groups": (Gradient(groups=2), "without groups"),
    "float64": (Gradient(), "not float64", "float64"),
    "odd channels": (Gradient(c=3), "both must be even"),
    "much padding": (Gradient(kernel=1, padding=1), "is not smaller than the kernel"),
    "many rows": (Gradient(kernel=33, size=(40, 40)), "up to 32 rows"),
    "another op": (lambda b: b("relu", b.x(2, 8, 4, 4)), "weight alone"),
}
WHOLE = Gradient(5, 64, (16, 16), 128, stride=2)


class TestContract(AnyGpu):
    family, chosen, refused = FAMILY, RUN, REFUSED
    configs = (
        (WHOLE, Attrs(WIDE, warp_n=64), "128 sums"),
        (WHOLE, Attrs(MMA, split_k=16), "K is split"),
    )


def test_pixels_are_split_and_channels_fill_tiles(step_of):
    parts = FAMILY.parts(step_of(WHOLE, "float16"))
    assert (parts.gemm.m, parts.gemm.n, parts.gemm.channels) == (128, 9 * 64, 5 * 8 * 8)


def test_a_search_tries_it_on_every_arch(step_of, cuda_arch):
    step = step_of(Gradient(128, 64, (16, 16), 64), "float16")
    assert len(candidates(step, load_search_space(cuda_arch.name), [FAMILY.name])) >= 4


def test_a_guess_is_near_to_what_was_measured(step_of):
    """11.2 us (ResNet-50 at 32x32, 128 images, H200, 2026-11-23)."""
    parts = FAMILY.parts(step_of(Gradient(128, 256, (2, 2), 256), "float16"))
    chosen = Attrs(MMA, stages=3, tile_k=32, tile_m=64, tile_n=128, warp_m=32, warp_n=64)
    assert 8 < FAMILY.estimate_us(parts, chosen, load_arch("sm90")) < 14
