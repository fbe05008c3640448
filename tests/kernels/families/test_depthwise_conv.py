"""Depthwise convolutions: which steps, which configs, that they build and are right."""

from __future__ import annotations

import pytest

from plantune.base.canonical import Attrs
from plantune.kernels.families.depthwise_conv import FAMILY, HELD_MAX
from plantune.kernels.registry import candidates, estimate_us
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

from .conftest import epilogue
from .contract import Contract

CONFIG = Attrs(rows=1, columns=4, threads=128)


def depthwise(*parts, x=(2, 32, 9, 11), filter=(3, 3), stride=(1, 1), padding=(1, 1)):
    """A filter for each channel, and what follows."""

    def emit(b):
        c = x[1]
        how = {"stride": stride, "padding": padding, "groups": c}
        y = b.conv(b.x(*x), b.w(c, 1, *filter), **how)
        return epilogue(b, y, parts, c)

    return emit


def gradient(*parts, x=(2, 32, 9, 11), filter=(3, 3), padding=(1, 1), **changed):
    """That of the image, and what follows."""

    def emit(b):
        c, (r, s) = x[1], filter
        rows, columns = (n + 2 * p - k + 1 for n, p, k in zip(x[2:], padding, filter, strict=True))
        how = {"stride": (1, 1), "padding": padding, "dilation": (1, 1), "groups": c, **changed}
        y = b("conv2d_dgrad", b.x(x[0], c, rows, columns), b.w(c, 1, r, s), shape=x, **how)
        return epilogue(b, y, parts, c)

    return emit


NORM = ("mul_channel", "add_channel")
STEPS = {
    "3x3": depthwise(),
    "3x3 of a norm": depthwise(*NORM, "relu6"),
    "3x3, stride 2, odd": depthwise(*NORM, "hardswish", stride=(2, 2)),
    "3x3, all parts": depthwise(*NORM, "residual", "relu", "offset"),
    "3x3, function first": depthwise(*NORM, "silu", "residual"),
    "5x5": depthwise("add_channel", "silu", filter=(5, 5), padding=(2, 2)),
    "5x5, stride 2": depthwise(x=(3, 48, 14, 14), filter=(5, 5), padding=(2, 2), stride=(2, 2)),
    "7x7": depthwise("add_channel", filter=(7, 7), padding=(3, 3), x=(2, 96, 14, 14)),
    "7x7 over all": depthwise(filter=(7, 7), padding=(0, 0), x=(2, 16, 7, 7)),
    "odd channels": depthwise("relu", x=(2, 9, 6, 5)),
    "half vectors": depthwise("relu", x=(1, 20, 6, 5)),
    "no padding": depthwise(padding=(0, 0), stride=(1, 2)),
    "a rectangle": depthwise(filter=(1, 5), padding=(0, 2)),
    "much padding": depthwise(padding=(2, 3), x=(1, 8, 3, 3)),
    "one pixel": depthwise(x=(3, 8, 1, 1)),
    "many rows": depthwise(*NORM, "silu", "residual", x=(2, 40, 19, 21)),
    "many rows, stride 2": depthwise("relu", x=(2, 16, 37, 23), stride=(2, 2)),
    "many rows, 5x5": depthwise(filter=(5, 5), padding=(2, 2), x=(1, 16, 18, 33)),
    "many rows, 5x5, stride 2": depthwise(
        filter=(5, 5), padding=(2, 2), x=(1, 16, 35, 33), stride=(2, 2)
    ),
    "many rows, no padding": depthwise(padding=(0, 0), x=(1, 24, 17, 9), stride=(1, 2)),
    "seven channels": depthwise("relu", x=(2, 7, 17, 9)),
    "an image's gradient": gradient(),
    "of other padding": gradient(padding=(0, 2), filter=(3, 5), x=(2, 24, 17, 12)),
    "with another added": gradient("residual", x=(1, 16, 20, 20)),
}


# By threads that finish each row on their way; of the others no row fits into registers.
SLID = [name for name in STEPS if name.startswith("many rows") and "5x5, stride" not in name]
REFUSED = {
    "all channels": (
        lambda b: b.conv(b.x(2, 8, 4, 4), b.w(8, 8, 3, 3)),
        "one filter of each channel",
    ),
    "two filters of each": (
        lambda b: b.conv(b.x(2, 8, 4, 4), b.w(16, 1, 3, 3), groups=8),
        "one filter of each channel",
    ),
    "a gradient of strides": (
        lambda b: b(
            "conv2d_dgrad",
            *(b.x(2, 8, 4, 4), b.w(8, 1, 3, 3)),
            **{"shape": (2, 8, 8, 8), "stride": (2, 2), "padding": (1, 1)},
            **{"dilation": (1, 1), "groups": 8},
        ),
        "without strides",
    ),
    "a gradient of wide padding": (gradient(padding=(3, 3)), "not smaller than the filter"),
    "dilation": (
        lambda b: b.conv(b.x(2, 8, 9, 9), b.w(8, 1, 3, 3), groups=8, dilation=(2, 2)),
        "without dilation",
    ),
    "no convolution": (lambda b: b("relu", b.x(2, 8, 4, 4)), "starts with relu"),
    "no image": (depthwise(x=(0, 8, 4, 4)), "nothing to compute"),
    "a large filter": (depthwise(filter=(13, 13), padding=(6, 6)), "up to 11"),
}


class TestContract(Contract):
    family, steps, refused = FAMILY, STEPS, REFUSED
    builds, config = ("7x7",), Attrs(CONFIG, columns=8)
    configs = (
        (depthwise(x=(2, 8, 12, 12)), Attrs(CONFIG, rows=4), "no room for 128 sums"),
        (depthwise(x=(2, 8, 12, 12)), Attrs(CONFIG, rows=8), None),
        (depthwise(x=(2, 8, 12, 12)), Attrs(CONFIG, rows=8, columns=1), "of 1 columns"),
        (depthwise(x=(2, 8, 12, 12)), Attrs(CONFIG, rows=8, threads=256), "registers idle"),
        (depthwise(x=(2, 8, 12, 24)), Attrs(CONFIG, rows=8, columns=8), "room for 10 columns"),
        (depthwise(x=(2, 8, 2, 3)), Attrs(CONFIG, rows=2, columns=2), None),
        (depthwise(x=(2, 8, 2, 3)), Attrs(CONFIG, rows=4, columns=2), "half of 4 rows hold all 2"),
        (depthwise(x=(2, 8, 2, 3)), Attrs(CONFIG, columns=8), "half of 8 columns hold all 3"),
    )

    def test_it_runs_every_step(self, name, dtype):
        step, space = self.step(STEPS[name], dtype), load_search_space("sm90")
        found = candidates(step, space, [FAMILY.name])
        assert found
        assert all(estimate_us(step, candidate, space.arch) > 0 for candidate in found)

    @pytest.mark.gpu
    def test_it_is_right(self, assert_right, gpu_space, case, dtype):
        step = self.step(STEPS[case], dtype)
        first, *others = candidates(step, gpu_space, [FAMILY.name])
        for candidate in {first, *others[1::7], *others[-1:]}:
            assert_right(step, candidate, gpu_space)

    @pytest.mark.parametrize("slid", SLID)
    def test_what_slides_down_many_rows_spills_nothing(self, build_within_limits, slid, dtype):
        step, arch = self.step(STEPS[slid], dtype), load_arch("sm90")
        parts = FAMILY.parts(step)
        configs = [Attrs(rows=8, columns=columns, threads=128) for columns in (1, 2, 4, 8)]
        fitting = [each for each in configs if FAMILY.why_not_config(parts, each, arch) is None]
        assert fitting
        for config in fitting:
            assert parts.held(config) * parts.vector(config) <= HELD_MAX
            build_within_limits(FAMILY, step, config, arch)
