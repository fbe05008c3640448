"""Gradients of weights by tensor copies: what they refuse, how pixels are cut, that they run."""

from __future__ import annotations

import itertools

import pytest

from plantune.base.canonical import Attrs
from plantune.kernels.families.hopper_wgrad import FAMILY
from plantune.kernels.hopper.tiles import Box
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

from .conftest import LAYERS
from .contract import Contract
from .weight_gradients import Gradient

ARCH = load_arch("sm90")
SPACE = load_search_space("sm90")


def layer(index, n=128):
    c, size, o, stride = LAYERS[index]
    return Gradient(n, c, (size, size), o, stride=stride)


def config(tile_m=64, tile_n=64, tile_k=256, order="pixels", stages=2, blocks=132, layout="nchw"):
    return Attrs(
        tile_m=tile_m,
        tile_n=tile_n,
        tile_k=tile_k,
        order=order,
        stages=stages,
        blocks=blocks,
        layout=layout,
    )


@pytest.mark.parametrize("n", [7, 128, 2048])
@pytest.mark.parametrize("index", range(len(LAYERS)))
def test_each_layer_has_configs(step_of, index, n):
    parts = FAMILY.parts(step_of(layer(index, n), "float16"))
    legal = [c for c in FAMILY.configs(SPACE) if FAMILY.why_not_config(parts, c, ARCH) is None]
    assert 4 <= len(legal) <= 400
    assert 2 < min(FAMILY.estimate_us(parts, c, ARCH) for c in legal) < 200


def test_other_archs_have_no_warpgroup_products():
    assert "wgmma" in FAMILY.why_not_arch(load_arch("sm80"))
    assert FAMILY.why_not_arch(load_arch("cpu")) is not None
    assert FAMILY.why_not_arch(ARCH) is None


@pytest.mark.parametrize(
    ("emit", "order", "box", "phase", "tap_pixels"),
    [
        (layer(0), "pixels", Box(16, 16, 1), (18, 18), 9 * 256),
        (layer(2), "pixels", Box(8, 8, 4), (10, 10), 9 * 256),
        # Of 4 rows of pixels 3, 4 and 3 are read by the taps of a row.
        (layer(4), "images", Box(4, 4, 16), (4, 4), 10 * 10 * 16),
        (layer(6), "images", Box(2, 2, 64), (2, 2), 4 * 4 * 64),
        (layer(5), "images", Box(2, 2, 64), (2, 2), 5 * 5 * 64),
        (layer(1), "pixels", Box(8, 8, 4), (9, 9), 9 * 256),
        (Gradient(2, size=(14, 14)), "pixels", Box(16, 14, 1), (18, 16), 9 * 224),
        (Gradient(128, kernel=1), "pixels", Box(256, 1, 1), (256, 1), 256),
    ],
)
def test_boxes_have_the_fewest_products_and_bytes(step_of, emit, order, box, phase, tap_pixels):
    cut = FAMILY.design(FAMILY.parts(step_of(emit, "float16")), config(order=order)).cut
    assert (cut.box, cut.phase, cut.tap_pixels) == (box, phase, tap_pixels)


@pytest.mark.parametrize("tile_k", [64, 256])
@pytest.mark.parametrize("order", ["pixels", "images"])
@pytest.mark.parametrize("size", [(1, 1), (3, 5), (7, 7), (31, 64)])
@pytest.mark.parametrize("stride", [1, 2])
def test_boxes_cover_all_pixels(step_of, size, order, tile_k, stride):
    parts = FAMILY.parts(step_of(Gradient(3, size=size, stride=stride), "float16"))
    cut = FAMILY.design(parts, config(order=order, tile_k=tile_k, blocks=1)).cut
    shape, box = parts.shape, cut.box
    assert cut.boxes * box.w * box.h * box.n >= shape.p * shape.q * shape.n
    assert cut.pixels <= tile_k
    assert cut.pixels % 32 == 0


def test_a_guess_knows_how_many_bytes_are_under_way(step_of):
    """33.6 us against 46.7 (H200, 2026-11-22)."""
    parts = FAMILY.parts(step_of(Gradient(2048, 48, (16, 16), kernel=1, padding=0), "float16"))
    most, least = (
        FAMILY.estimate_us(parts, config(tile_k=128, stages=stages, blocks=blocks), ARCH)
        for stages, blocks in ((3, 132), (2, 66))
    )
    assert least > 1.2 * most


BUILT = [
    (layer(0, 512), config(stages=3)),
    (layer(1), config(tile_k=64, layout="nhwc")),
    (layer(4), config(order="images", stages=2)),
    (Gradient(128, 256, kernel=1, o=128), config(128, 256, 64, stages=3, blocks=33)),
]


IMAGES = {"order": "images"}
RUN = {
    **{f"layer {i}": (layer(i, 7), config(tile_k=64, blocks=1)) for i in range(len(LAYERS))},
    **{
        f"layer {i}, images": (layer(i, 129), config(**IMAGES, tile_k=256, blocks=1))
        for i in range(4, len(LAYERS))
    },
    "one image": (Gradient(1, size=(16, 16)), config(blocks=1)),
    "many parts": (Gradient(129, size=(16, 16)), config(layout="nhwc")),
    "three stages": (Gradient(129, size=(16, 16)), config(stages=3, blocks=33)),
    "many images": (Gradient(700, 64, (4, 4), 128), config(**IMAGES, blocks=33)),
    "places in parts": (Gradient(33, 64, (5, 7)), config(**IMAGES, tile_k=64, blocks=1)),
    "ragged": (Gradient(3, 72, (14, 9), 40), config(blocks=1)),
    "ragged, stride 2": (Gradient(5, 72, (13, 9), 136, stride=2), config(tile_k=64, blocks=16)),
    "few channels": (Gradient(3, 8, (9, 9), 16), config(layout="nhwc", blocks=1)),
    "no padding": (Gradient(3, 64, (9, 7), padding=0), config(blocks=1)),
    "2x2": (Gradient(3, 64, (8, 8), kernel=2, padding=0, stride=2), config(blocks=1)),
    "much padding": (Gradient(3, 64, (9, 7), padding=2), config(blocks=1)),
    "1x1": (Gradient(7, 96, (9, 9), 72, kernel=1), config(tile_k=64, blocks=16)),
    "1x1, wide": (Gradient(7, 256, (8, 8), 192, kernel=1), config(128, 256, 64, blocks=4)),
    "1x1, stride 2": (Gradient(9, 64, (9, 9), 128, kernel=1, stride=2), config(128, blocks=4)),
    "1x1, images": (
        Gradient(40, 64, (9, 9), 128, kernel=1, stride=2),
        config(128, **IMAGES, tile_k=64, blocks=4),
    ),
}


REFUSED = {
    "float32": (Gradient(), "float16 or bfloat16, got float32", "float32"),
    "odd channels": (Gradient(c=12), "do not start at 16 bytes"),
    "odd outputs": (Gradient(o=20), "do not start at 16 bytes"),
    "groups": (Gradient(groups=2), "without groups"),
    "dilation": (Gradient(dilation=2), "without groups and dilation"),
    "a large kernel": (Gradient(kernel=5), "got 5x5"),
    "far steps": (Gradient(stride=3), "strides up to 2"),
    "much padding": (Gradient(kernel=1, padding=1), "is not smaller than the kernel"),
    "another op": (lambda b: b("affine", Gradient()(b), alpha=2.0, beta=0.0), "weight alone"),
}


class TestContract(Contract):
    family, chosen, refused = FAMILY, RUN, REFUSED
    dtypes = ("float16", "bfloat16")
    configs = (
        (layer(2), config(tile_m=128), "6 warpgroups"),
        (layer(2), config(tile_n=128), "192 sums of each thread"),
        (Gradient(kernel=1, c=64), config(tile_n=128), "half of the tile"),
        (Gradient(1), config(blocks=66), "half of 66 blocks"),
        (Gradient(64, size=(16, 16)), config(stages=3, blocks=66), "no more than 1 boxes"),
        (layer(0, 2048), config(stages=4), "bytes of shared memory"),
        (Gradient(2, size=(3, 3)), config(order="images", tile_k=64), "half of"),
    )
    builds_chosen = tuple(
        (*built, dtype) for built, dtype in zip(BUILT, itertools.cycle(dtypes), strict=False)
    )

    def kernels(self, step, config):
        return {"run", "sum"}
