"""Gradients of images by tensor copies: what they refuse, that they build and run."""

from __future__ import annotations

from collections import Counter

import pytest

from plantune.base.canonical import Attrs
from plantune.graph.fusions import fusions_named, groups_from
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.step import make_step
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.kernels.families.hopper_dgrad import FAMILY
from plantune.kernels.hopper.tiles import Box
from plantune.models.se_resnet9 import se_resnet9_fixup
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

from .contract import Contract
from .image_gradients import (
    APART,
    EARLIEST,
    FIRST,
    MASKED,
    POOLED,
    POOLED_APART,
    SECOND,
    Gradient,
)

ARCH = load_arch("sm90")
SPACE = load_search_space("sm90")
# Channels and size of the network's 3x3 convolutions with stride 1, and of those with stride 2.
LAYERS = [(64, 16), (128, 8), (256, 4), (512, 2)]
STRIDED = [(64, 16), (128, 8), (256, 4)]


def config(tile_m, tile_n, stages=4, split_k=1, reuse=False, blocks_per_sm=1):
    return Attrs(
        tile_m=tile_m,
        tile_n=tile_n,
        stages=stages,
        split_k=split_k,
        reuse=reuse,
        blocks_per_sm=blocks_per_sm,
    )


@pytest.mark.parametrize("n", [7, 2048])
@pytest.mark.parametrize("index", range(len(LAYERS)))
def test_each_layer_has_configs(step_of, index, n):
    channels, size = LAYERS[index]
    assert_has_configs(step_of(Gradient(n, channels, (size, size), channels), "float16"))


@pytest.mark.parametrize("n", [7, 2048])
@pytest.mark.parametrize(("channels", "size"), STRIDED)
def test_each_strided_layer_has_configs(step_of, channels, size, n):
    emit = Gradient(n, channels, (size, size), 2 * channels, stride=2, parts=FIRST)
    assert_has_configs(step_of(emit, "float16"))


def assert_has_configs(step):
    parts = FAMILY.parts(step)
    legal = [c for c in FAMILY.configs(SPACE) if FAMILY.why_not_config(parts, c, ARCH) is None]
    assert 10 <= len(legal) <= 400
    assert 2 < min(FAMILY.estimate_us(parts, c, ARCH) for c in legal) < 200


def test_steps_of_the_network_have_all_that_follows_a_gradient():
    """Sums of 67 MB, each a pass of its own otherwise."""
    graph = differentiate(
        extract(se_resnet9_fixup(3).half(), TensorType((8, 3, 64, 64), "float16"))
    )
    fusions, found = fusions_named("masked_dgrad", "pooled_dgrad"), Counter()
    for node in graph.nodes:
        groups = [group for fusion in fusions for group in groups_from(graph, node, fusion)]
        step = make_step(graph, max(groups, key=len, default=(node.name,)))
        if node.op == "conv2d_dgrad" and FAMILY.why_not_step(step) is None:
            found[tuple(op for op in step.ops if op != "conv2d_dgrad")] += 1
    second, pooled = ("sum_to", "apart_grad", "sum_to"), ("add", "sum_to", "apart_grad")
    pooled, earliest = ("avg_pool2d_grad", *pooled), ("sum_to", "add", "relu_grad")
    assert found == {(): 3, second: 4, pooled: 3, earliest: 1}


@pytest.mark.parametrize("parts", [SECOND, POOLED, ("all",), ("relu_grad", "channels")])
def test_a_step_reads_and_makes_images_beside_its_sums(step_of, parts):
    found = FAMILY.parts(step_of(Gradient(parts=parts, stride=2), "float16"))
    shapes = {name: found.step.types[name].shape for name in (found.x, found.y)}
    assert shapes == {found.x: (2, 64, 4, 4), found.y: (2, 64, 8, 8)}


@pytest.mark.parametrize(("kernel", "padding"), [(1, 0), (2, 0), (3, 1), (3, 0), (4, 1), (5, 2)])
def test_phases_have_the_taps_that_meet_pixels(step_of, kernel, padding):
    step = step_of(Gradient(1, size=(12, 8), kernel=kernel, padding=padding, stride=2), "float16")
    shape = FAMILY.parts(step).shape

    def pairs(size, results):
        places = (h + padding - r for h in range(size) for r in range(kernel))
        return sum(place % 2 == 0 and 0 <= place // 2 < results for place in places)

    assert shape.taps(Box(1, 1, 1))[1] == pairs(12, shape.h) * pairs(8, shape.w)


BUILT = [
    (Gradient(128, 64, (16, 16), 64), config(256, 64, 6, reuse=True)),
    (Gradient(parts=("relu_grad",), leaves="conv"), config(128, 64, 4, reuse=True)),
    (Gradient(128, 256, (4, 4), 256, parts=MASKED, leaves="conv"), config(64, 256, 3)),
    (Gradient(128, 512, (2, 2), 512, parts=MASKED, leaves="add"), config(128, 128, 3, split_k=2)),
    (Gradient(128, 64, (16, 16), 64, parts=SECOND), config(256, 64, 6, reuse=True)),
    (Gradient(128, 64, (16, 16), 64, parts=EARLIEST), config(128, 64, 4, reuse=True)),
    (Gradient(128, 256, (4, 4), 256, parts=SECOND), config(128, 256, 3)),
    (Gradient(128, 512, (2, 2), 512, parts=("relu_grad", "channels")), config(128, 128, 3)),
    (Gradient(128, 64, (16, 16), 128, stride=2, parts=FIRST), config(128, 64, 4, reuse=True)),
    (Gradient(128, 128, (8, 8), 256, stride=2, parts=FIRST), config(128, 128, 3)),
    (Gradient(128, 64, (16, 16), 128, stride=2, parts=POOLED), config(128, 64, 4, reuse=True)),
]


RUN = {
    **{
        f"layer {size}": (Gradient(n, channels, (size, size), channels), config(64, 64, split_k=2))
        for n, (channels, size) in zip((1, 7, 129, 129), LAYERS, strict=True)
    },
    "reuse": (Gradient(3, 128, (16, 16), 192), config(128, 128, 4, reuse=True)),
    "wide": (Gradient(7, 256, (4, 4), 128), config(128, 256, 3)),
    "ragged": (Gradient(3, 72, (14, 9), 40), config(64, 64, 4, reuse=True)),
    "ragged, wide": (Gradient(3, 200, (7, 7), 88), config(64, 256, 4)),
    "1x1": (Gradient(3, 96, (9, 9), 72, kernel=1), config(64, 128, 3)),
    "5x5": (Gradient(2, 64, (9, 7), 64, kernel=5), config(64, 64)),
    "no padding": (Gradient(2, 64, (9, 7), 64, padding=0), config(64, 64)),
    "added": (Gradient(parts=("add",), leaves="conv"), config(64, 64)),
    "masked": (Gradient(parts=("relu_grad",), leaves="conv"), config(128, 64)),
    "masked alone": (Gradient(7, 128, parts=("relu_grad",)), config(128, 128)),
    "both": (Gradient(7, 128, parts=MASKED), config(64, 64, 4, split_k=2)),
    "both, the first is read": (Gradient(parts=MASKED, leaves="conv"), config(64, 64, reuse=True)),
    "both, the sum is read": (Gradient(parts=MASKED, leaves="add"), config(64, 64)),
    "summed": (Gradient(7, 64, (5, 7), 64, parts=("all",)), config(64, 64)),
    "second": (Gradient(129, 128, (8, 8), 128, parts=SECOND), config(128, 128, 4)),
    "second, reuse": (Gradient(3, 72, (14, 9), 40, parts=SECOND), config(128, 64, reuse=True)),
    "second, shared": (Gradient(7, 256, (4, 4), 88, parts=SECOND), config(64, 64, split_k=4)),
    "first": (Gradient(7, 256, (4, 4), 128, parts=FIRST), config(64, 256, 3)),
    "earliest": (Gradient(7, 64, (16, 16), 64, parts=EARLIEST, leaves="conv"), config(64, 64)),
    "channels": (Gradient(7, 200, (5, 3), 64, parts=("channels",)), config(64, 128)),
    "channels, shared": (
        Gradient(9, 72, (9, 8), 40, parts=("all", "channels", "relu_grad", "channels", "all")),
        config(128, 64, split_k=2, reuse=True),
    ),
    **{
        f"stride 2, layer {size}": (
            Gradient(n, channels, (size, size), 2 * channels, stride=2, parts=FIRST),
            config(64, 64, split_k=2),
        )
        for n, (channels, size) in zip((3, 129, 7), STRIDED, strict=True)
    },
    "stride 2, odd": (
        Gradient(3, 72, (15, 10), 40, stride=2, parts=("all", "relu_grad", "channels")),
        config(64, 64),
    ),
    "stride 2, reuse": (
        Gradient(3, 64, (16, 19), 192, stride=2, parts=FIRST, leaves="conv"),
        config(128, 64, reuse=True),
    ),
    "stride 2, 1x1": (Gradient(3, 64, (9, 8), 72, 1, 2, parts=FIRST), config(64, 64, 2)),
    "stride 2, 2x2": (Gradient(2, 64, (9, 8), 64, 2, 2, padding=0), config(64, 64, 1)),
    "stride 2, 5x5": (Gradient(2, 128, (13, 10), 64, 5, 2, parts=SECOND), config(128, 128)),
    "stride 2, padding of 2": (Gradient(2, 64, (9, 8), 64, 3, 2, padding=2), config(64, 64)),
    **{
        f"pooled, layer {size}": (
            Gradient(n, channels, (size, size), 2 * channels, stride=2, parts=POOLED),
            config(64, 64, split_k=2),
        )
        for n, (channels, size) in zip((3, 129, 7), STRIDED, strict=True)
    },
    "pooled, reuse": (
        Gradient(3, 72, (16, 19), 192, stride=2, parts=POOLED, leaves="conv"),
        config(128, 64, reuse=True),
    ),
    "pooled, 2x2": (
        Gradient(5, 200, (8, 12), 64, stride=2, parts=("pool", "all"), pool=(2, 0)),
        config(128, 128),
    ),
    "pooled, 4x4": (
        Gradient(5, 64, (10, 13), 64, stride=2, parts=("pool",), pool=(4, 2)),
        config(64, 64),
    ),
    "pooled, no padding": (
        Gradient(5, 64, (10, 13), 64, stride=2, padding=0, parts=("pool",)),
        config(64, 64),
    ),
    "pooled, stride 1": (
        Gradient(2, 64, (9, 8), 64, parts=POOLED, pool=(2, 1)),
        config(64, 64),
    ),
    "stride 2, no padding": (Gradient(2, 64, (10, 7), 64, 3, 2, padding=0), config(64, 64)),
}


# With so many tiles that blocks stay.
STAYING = {
    "staying": (Gradient(130, 64, (16, 16), 64, parts=SECOND), config(128, 64)),
    "staying, few steps": (Gradient(270, 128, (8, 8), 40, 1, parts=MASKED), config(128, 64, 1)),
    "staying, pooled": (
        Gradient(270, 128, (8, 8), 256, stride=2, parts=POOLED),
        config(64, 64),
    ),
    "staying, apart": (Gradient(130, 64, (16, 16), 64, parts=APART), config(128, 64)),
    "staying, pooled, apart": (
        Gradient(270, 128, (8, 8), 256, stride=2, parts=POOLED_APART),
        config(64, 64),
    ),
    "staying, wide": (Gradient(270, 128, (8, 8), 256, stride=2, parts=POOLED), config(64, 128, 3)),
    "staying, odd": (
        Gradient(60, 72, (15, 10), 40, stride=2, parts=("all", "relu_grad", "channels")),
        config(64, 64),
    ),
    "staying, two leave": (
        Gradient(60, 72, (19, 13), 40, parts=MASKED, leaves="add"),
        config(64, 64),
    ),
    "staying, reuse": (
        Gradient(130, 64, (16, 16), 64, parts=EARLIEST, leaves="conv"),
        config(128, 64, reuse=True),
    ),
}
RUN |= STAYING


@pytest.mark.parametrize("name", STAYING)
def test_blocks_stay_where_tiles_are_many(step_of, name):
    emit, chosen = STAYING[name]
    design = FAMILY.design(FAMILY.parts(step_of(emit, "float16")), chosen)
    assert design.persistent
    assert design.launched == 132 < design.blocks


NO_PLACE = "no place after the gradient"
REFUSED = {
    "float32": (Gradient(), "float16 or bfloat16, got float32", "float32"),
    "odd channels": (Gradient(c=12), "do not start at 16 bytes"),
    "groups": (Gradient(groups=2), "without groups"),
    "far steps": (Gradient(stride=3), "strides up to 2, got (3, 3)"),
    "one row": (Gradient(size=(1, 8), stride=2), "is smaller than the stride (2, 2)"),
    "much padding": (Gradient(kernel=1, padding=1), "is not smaller than the kernel"),
    "a product": (Gradient(parts=("mul",)), NO_PLACE),
    "added to itself": (Gradient(parts=("itself",)), NO_PLACE),
    "masked by the gradient": (Gradient(parts=("swapped",)), NO_PLACE),
    "a sum after the mask": (Gradient(parts=("relu_grad", "add")), NO_PLACE),
    "a pool of pixels": (Gradient(parts=("pool",)), "more than 2x2 windows"),
    "two pools": (Gradient(parts=("all", "pool", "pool"), stride=2), NO_PLACE),
    "a pool that counts pixels": (
        Gradient(parts=("pool",), stride=2, counted=False),
        "count other pixels",
    ),
    "sums of images": (Gradient(parts=("images",)), "sum at 'sum' has no place after the gradient"),
    "a gradient that stays": (lambda b: Gradient(parts=("all",))(b)[1], "does not leave the step"),
    "two early values": (
        Gradient(parts=("add", "relu_grad"), leaves="conv add"),
        "two values before the end",
    ),
    "a convolution": (
        lambda b: b.conv(b.x(2, 64, 8, 8), b.w(64, 64, 3, 3)),
        "not with an image's gradient",
    ),
}


class TestContract(Contract):
    family, chosen, refused = FAMILY, RUN, REFUSED
    dtypes = ("float16", "bfloat16")
    builds_chosen = (*BUILT, STAYING["staying, pooled"])

    def kernels(self, step, config):
        return {"run", "add"} if {"sum", "sum_to"} & {*step.ops} else {"run"}
