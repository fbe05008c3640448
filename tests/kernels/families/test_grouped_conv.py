"""Convolutions in groups: how channels are divided, packed and tiled, that they are right."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from plantune.base.canonical import Attrs
from plantune.kernels.cuda.grouped_filters import Groups
from plantune.kernels.families import grouped_conv
from plantune.kernels.families.grouped_conv import FAMILY
from plantune.kernels.registry import candidates, estimate_us
from plantune.plans.guess import hand_plan
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

from .conftest import epilogue
from .contract import Contract

CONFIG = Attrs(rows=4, columns=8, threads=128)


def grouped(
    *parts,
    x=(2, 32, 9, 11),
    outputs=None,
    groups=4,
    filter=(3, 3),
    stride=(1, 1),
    padding=(1, 1),
):
    """A convolution in groups, and what follows."""

    def emit(b):
        o = outputs or x[1]
        w = b.w(o, x[1] // groups, *filter)
        y = b.conv(b.x(*x), w, stride=stride, padding=padding, groups=groups)
        return epilogue(b, y, parts, o)

    return emit


POOL = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1)}


def pooled(*parts, pool=POOL, **sizes):
    """The same with a max pool behind it."""
    emit = grouped(*parts, **sizes)
    return lambda b: b("max_pool2d", emit(b), **pool)


NORM = ("mul_channel", "add_channel")
STEPS = {
    "groups of 8": grouped(*NORM, "relu"),
    "groups of 4": grouped("add_channel", "relu", groups=8),
    "groups of 2": grouped(groups=16),
    "groups of 16": grouped(*NORM, "residual", "relu", "offset", groups=2),
    "groups of 24": grouped("add_channel", "silu", x=(1, 72, 7, 7), groups=3),
    "groups of 40": grouped(x=(1, 80, 8, 8), groups=2),
    "groups of 64": grouped("silu", "residual", x=(1, 128, 7, 7), groups=2),
    "wide groups": grouped(*NORM, "relu", x=(2, 320, 7, 9), groups=2, stride=(2, 2)),
    "wide groups, four times as many out": grouped(
        "add_channel", x=(2, 224, 8, 8), outputs=896, groups=2, filter=(2, 2), padding=(0, 0)
    ),
    "the widest groups": grouped("residual", x=(1, 1024, 5, 5), groups=2),
    "a slab that is not full": grouped("relu", x=(2, 104, 7, 5), groups=13),
    "stride 2, odd": grouped(*NORM, "hardswish", stride=(2, 2)),
    "more channels out": grouped("relu", outputs=96),
    "fewer channels out": grouped(x=(1, 64, 5, 5), outputs=32),
    "1x1": grouped("add_channel", filter=(1, 1), padding=(0, 0)),
    "5x5": grouped(filter=(5, 5), padding=(2, 2)),
    "a rectangle": grouped(filter=(3, 1), padding=(1, 0), stride=(2, 1)),
    "no groups": grouped("add_channel", "residual", x=(2, 16, 9, 11), groups=1),
    "32 channels": grouped("relu", outputs=24, groups=1, stride=(2, 2)),
    "one tap, far more out": grouped(
        *NORM, "silu", x=(2, 24, 9, 11), outputs=144, groups=1, filter=(1, 1), padding=(0, 0)
    ),
    "one tap, added to": grouped(
        "residual", "relu", x=(1, 48, 9, 5), outputs=256, groups=1, filter=(1, 1), padding=(0, 0)
    ),
    "neighbours as one pixel": grouped(
        "relu", x=(2, 4, 20, 24), outputs=32, groups=1, filter=(8, 8), stride=(4, 4), padding=(0, 0)
    ),
    "one pixel": grouped(x=(3, 32, 1, 1)),
    "a pool": pooled("add_channel", x=(2, 16, 17, 22), groups=1),
    "a pool, even": pooled(*NORM, "relu", x=(2, 16, 16, 32), outputs=32, groups=1),
    "a pool, groups, stride 2": pooled("silu", x=(2, 32, 37, 29), stride=(2, 2)),
    "a pool of few pixels": pooled(x=(2, 32, 5, 8)),
    "a pool of a few rows": pooled(x=(1, 32, 6, 50)),
    "three channels": grouped("add_channel", "relu", x=(2, 3, 19, 21), outputs=16, groups=1),
    "three channels, added to": grouped(
        "add_channel", "residual", "relu", x=(2, 3, 19, 21), outputs=16, groups=1
    ),
    "three channels and a pool": pooled("add_channel", x=(2, 3, 64, 64), outputs=16, groups=1),
    "three channels, odd": pooled(*NORM, "relu", x=(3, 3, 33, 35), outputs=24, groups=1),
    "one channel": pooled(x=(2, 1, 28, 28), outputs=8, groups=1, filter=(5, 5), padding=(2, 2)),
    "four channels": grouped(
        "relu", x=(2, 4, 21, 23), outputs=32, groups=1, filter=(4, 4), padding=(0, 0)
    ),
    "two channels, stride 2": pooled(
        "relu", x=(2, 2, 31, 33), outputs=16, groups=1, filter=(7, 7), padding=(3, 3), stride=(2, 2)
    ),
    "no padding": grouped(padding=(0, 0)),
}


POOLS_AND_FEW = [name for name in STEPS if "pool" in name or "channels" in name]


@pytest.mark.parametrize(("width", "family"), [(128, FAMILY.name), (136, "framework")])
def test_a_plan_by_hand_leaves_wide_groups_to_the_framework(graph_of, width, family):
    """How long they take is not known before a search has measured it."""
    graph = graph_of(grouped("relu", x=(8, 2 * width, 14, 14), groups=2), "float16")
    plan = hand_plan(graph, load_search_space("sm90"), network="x")
    assert plan.choices[0].candidate.family == family


def test_large_images_have_configs(step_of):
    space = load_search_space("sm90")
    for shape, groups in (((8, 48, 56, 56), 6), ((8, 440, 7, 7), 55), ((8, 128, 28, 28), 32)):
        step = step_of(grouped(x=shape, groups=groups), "float16")
        legal = candidates(step, space, [FAMILY.name])
        assert len(legal) > 3
        assert all(estimate_us(step, candidate, space.arch) > 0 for candidate in legal)


REFUSED = {
    "many channels": (grouped(x=(2, 40, 9, 11), groups=1), "for up to 32 channels in"),
    "many channels of a tap": (
        grouped(x=(2, 64, 9, 11), groups=1, filter=(1, 1), padding=(0, 0)),
        "for up to 48 channels in and 256 out",
    ),
    "very many out": (grouped(outputs=264, groups=1), "for up to 32 channels in and 256 out"),
    "few unlike channels": (grouped(x=(1, 6, 9, 9), outputs=32, groups=1), "not multiples of 8"),
    "few channels out": (grouped(x=(1, 3, 9, 9), outputs=12, groups=1), "not multiples of 8"),
    "another pool": (pooled(pool={**POOL, "padding": (0, 0)}), "only a pool of 3x3"),
    "a pool of a sum": (pooled("residual"), "may be before a pool"),
    "depthwise": (grouped(groups=32), "in groups of some channels"),
    "groups of 12": (grouped(x=(1, 48, 4, 4), groups=4), "are not multiples of 8"),
    "wide groups": (grouped(x=(1, 1040, 4, 4), groups=2), "up to 512"),
    "dilation": (
        lambda b: b.conv(b.x(2, 32, 9, 9), b.w(32, 8, 3, 3), groups=4, dilation=(2, 2)),
        "without dilation",
    ),
    "no convolution": (lambda b: b("relu", b.x(2, 8, 4, 4)), "starts with relu"),
    "float32": (grouped(), "not float32", "float32"),
    "no image": (grouped(x=(0, 32, 4, 4)), "nothing to compute"),
}


FLAT = grouped(x=(1, 32, 7, 14))


class TestContract(Contract):
    family, steps, refused, config = FAMILY, STEPS, REFUSED, CONFIG
    dtypes = ("float16", "bfloat16")
    without_config = frozenset({"one pixel"})
    builds = (
        "wide groups, four times as many out",
        "groups of 16",
        "no groups",
        "stride 2, odd",
        "three channels and a pool",
    )
    configs = (
        (FLAT, Attrs(CONFIG, rows=14), "half of 14 rows hold all 7"),
        (FLAT, Attrs(CONFIG, columns=28), "half of 28 columns hold all 14"),
        (FLAT, Attrs(CONFIG, rows=1), "not 8"),
        (FLAT, CONFIG, None),
    )

    @pytest.mark.gpu
    def test_it_is_right(self, assert_right, gpu_space, case, dtype):
        step, every = self.step(STEPS[case], dtype), 5 if case in POOLS_AND_FEW else 19
        for candidate in candidates(step, gpu_space, [FAMILY.name])[::every]:
            assert_right(step, candidate, gpu_space)


@pytest.mark.parametrize("arch", ["sm70", "sm75"])
def test_it_needs_products_that_older_chips_do_not_have(arch):
    assert "no products" in FAMILY.why_not_arch(load_arch(arch))


@pytest.mark.parametrize(
    ("count", "inputs", "outputs", "kernels"),
    [
        (32, 4, 4, (16, 8, 8, 2)),
        (4, 2, 8, (1, 8, 32, 4)),
        (55, 8, 8, (55, 8, 8, 1)),
        (3, 4, 4, (3, 4, 4, 1)),
        (7, 24, 24, (7, 24, 24, 1)),
    ],
)
def test_groups_too_narrow_for_a_product_are_merged(count, inputs, outputs, kernels):
    assert Groups.of(count, inputs, outputs) == Groups(*kernels)


@pytest.mark.parametrize(
    ("count", "inputs", "slab"), [(13, 8, 7), (55, 8, 8), (2, 64, 1), (1, 8, 1)]
)
def test_slabs_are_as_wide_as_a_line_and_about_equal(count, inputs, slab):
    assert Groups.of(count, inputs, inputs).slab == slab


@pytest.mark.parametrize(
    "name", ["groups of 8", "groups of 4", "groups of 24", "more channels out"]
)
def test_packed_filters_give_the_convolution(step_of, name):
    """The kernel's sum over units, lanes and words, written out."""
    parts = FAMILY.parts(step_of(STEPS[name], "float16"))
    groups, (_, form) = parts.groups, grouped_conv._constants(parts)["w"]
    x = torch.randn(parts.step.types[parts.x].shape, dtype=torch.float64)
    w = torch.randn(parts.step.types[parts.weight].shape, dtype=torch.float64)
    packed = form.order(w)
    assert packed.shape == form.shape
    exact = F.conv2d(x, w, padding=1, groups=parts.conv.attrs["groups"])

    n, _, height, width = x.shape
    taps = F.unfold(x, 3, padding=1).view(n, groups.count, groups.inputs, 9, -1)
    units = taps.transpose(2, 3).reshape(n, groups.count, -1, 8, height * width)
    units = F.pad(units, (0, 0, 0, 0, 0, units.shape[2] % 2))
    units = units.view(n, groups.count, -1, 2, 4, 2, height * width)
    found = torch.einsum("gjsotre,ngsrtep->ngjop", packed, units)
    torch.testing.assert_close(found.reshape(exact.shape), exact)


@pytest.mark.parametrize(
    "name", ["three channels", "one channel", "four channels", "two channels, stride 2"]
)
def test_packed_taps_of_few_channels_give_the_convolution(step_of, name):
    """The kernel's sum over pixels with their right neighbours, written out."""
    parts = FAMILY.parts(step_of(STEPS[name], "float16"))
    form, attrs, (rows, columns) = (
        grouped_conv._constants(parts)["w"][1],
        parts.conv.attrs,
        parts.filter,
    )
    x = torch.randn(parts.step.types[parts.x].shape, dtype=torch.float64)
    w = torch.randn(parts.step.types[parts.weight].shape, dtype=torch.float64)
    packed = form.order(w)
    assert packed.shape == form.shape
    geometry = {"stride": attrs["stride"], "padding": attrs["padding"]}
    exact = F.conv2d(x, w, **geometry)

    n, channels, *_ = x.shape
    (above, beside), even = attrs["padding"], columns % 2
    wide = F.pad(x, (beside, beside + even, above, above, 0, 4 - channels))
    taps = F.unfold(wide, (rows, columns + even), stride=attrs["stride"])
    taps = taps.view(n, 4, rows, (columns + even) // 2, 2, -1).permute(0, 2, 3, 4, 1, 5)
    units = taps.reshape(n, parts.units, 8, -1)
    units = F.pad(units, (0, 0, 0, 0, 0, units.shape[1] % 2)).view(n, -1, 2, 4, 2, units.shape[3])
    found = torch.einsum("jsotre,nsrtep->njop", packed[0], units)
    torch.testing.assert_close(found.reshape(exact.shape), exact)


def test_a_tile_of_a_pool_is_one_wider_than_its_windows_apart(step_of):
    parts = FAMILY.parts(step_of(STEPS["three channels and a pool"], "float16"))
    config = Attrs(CONFIG, rows=8, columns=16)
    assert parts.made(config) == Attrs(CONFIG, rows=17, columns=33)
    assert parts.shared_bytes(config) == 16 * (19 * 35 + 17 * 33 * 3)
    assert parts.blocks(config) == (2 * 4 * 2, 1)
    assert parts.units == 6


def test_shared_memory_is_that_of_both_tiles(step_of):
    parts = FAMILY.parts(step_of(grouped(), "float16"))
    assert parts.shared_bytes(CONFIG) == 16 * (6 * 10 * 5 + 4 * 8 * 5)
    assert parts.blocks(CONFIG) == (2 * math.ceil(9 / 4) * math.ceil(11 / 8), 1)


@pytest.mark.parametrize("name", ["three channels, added to", "no groups"])
def test_what_is_added_has_come_before_it_is_read(step_of, name):
    """Copies that no thread waits for may come after the sums that need them."""
    step, arch = step_of(STEPS[name], "float16"), load_arch("sm80")
    text = FAMILY.build_portable(FAMILY.parts(step), CONFIG, arch).image.decode()
    aligned = text.split(".entry run(")[1].split(".entry")[0]
    last_copy = aligned.rindex("cp.async.cg")
    barrier = aligned.index("bar.sync", last_copy)
    assert "cp.async.wait_all" in aligned[last_copy:barrier]
