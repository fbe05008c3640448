"""Gradients of images by tensor copies: what they refuse, that they build and run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from plantune.canonical import Attrs
from plantune.graph.differentiate import differentiate
from plantune.graph.extract import extract
from plantune.graph.fusions import fusions_named, groups_from
from plantune.graph.step import make_step
from plantune.graph.types import TensorType
from plantune.kernels.families.hopper_dgrad import FAMILY
from plantune.kernels.families.resident_dgrad import FAMILY as RESIDENT_FAMILY
from plantune.kernels.family import Candidate
from plantune.kernels.hopper.tiles import Box
from plantune.kernels.registry import why_not
from plantune.models.se_resnet9 import se_resnet9_fixup
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

ARCH = load_arch("sm90")
SPACE = load_search_space("sm90")
# Channels and size of the network's 3x3 convolutions with stride 1, and of those with stride 2.
LAYERS = [(64, 16), (128, 8), (256, 4), (512, 2)]
STRIDED = [(64, 16), (128, 8), (256, 4)]
MASKED = ("add", "relu_grad")
# What the network does after the second convolution of a block, after the first with stride 2, and
# after the first of all.
SECOND = ("all", "relu_grad", "all")
FIRST = ("add", "all", "relu_grad")
POOLED = ("pool", "all", "relu_grad")
EARLIEST = ("all", "add", "relu_grad")
SUMS = {
    "all": ("sum_to", {"shape": (1,)}),
    "channels": ("sum", {"dims": (0, 2, 3), "keepdim": False}),
    "images": ("sum", {"dims": (2, 3), "keepdim": False}),
}


@dataclass(frozen=True)
class Gradient:
    """The gradient of an image of `c` channels; `leaves` is a value on the way that is read. Parts
    that are sums add what the part before them makes.
    """

    n: int = 2
    c: int = 64
    size: tuple[int, int] = (8, 8)
    o: int = 64
    kernel: int = 3
    stride: int = 1
    padding: int | None = None
    groups: int = 1
    parts: tuple[str, ...] = ()
    leaves: str = ""
    pool: tuple[int, int] = (3, 1)
    counted: bool = True

    def __call__(self, b):
        padding = self.kernel // 2 if self.padding is None else self.padding
        shape = (self.n, self.c, *self.size)
        result = [(s + 2 * padding - self.kernel) // self.stride + 1 for s in self.size]
        dy = b.x(self.n, self.o, *result)
        w = b.w(self.o, self.c // self.groups, self.kernel, self.kernel)
        pair = {"stride": (self.stride,) * 2, "padding": (padding,) * 2, "dilation": (1, 1)}
        values = {"conv": b("conv2d_dgrad", dy, w, groups=self.groups, shape=shape, **pair)}
        last, sums = values["conv"], []
        for part in self.parts:
            if part in SUMS:
                op, attrs = SUMS[part]
                sums.append(b(op, last, **attrs))
            elif part == "mul":
                last = b("mul", last, b.w(1))
            elif part == "itself":
                last = b("add", last, last)
            elif part == "pool":
                last = b("add", self.pooled(b, shape), last)
            elif part == "swapped":
                last = b("relu_grad", b.x(*shape), last)
            else:
                last = b(part, last, b.x(*shape))
            values[part] = last
        return (last, *(values[name] for name in self.leaves.split()), *sums)

    def pooled(self, b, shape):
        """The gradient of a pool of the same image."""
        kernel, padding = self.pool
        sizes = [(size + 2 * padding - kernel) // self.stride + 1 for size in self.size]
        attrs = {"kernel": (kernel,) * 2, "padding": (padding,) * 2, "stride": (self.stride,) * 2}
        dy = b.x(self.n, self.c, *sizes)
        return b("avg_pool2d_grad", dy, shape=shape, count_padding=self.counted, **attrs)


def config(tile_m, tile_n, stages=4, split_k=1, reuse=False, blocks_per_sm=1):
    return Attrs(
        tile_m=tile_m,
        tile_n=tile_n,
        stages=stages,
        split_k=split_k,
        reuse=reuse,
        blocks_per_sm=blocks_per_sm,
    )


def refusal(step, candidate_config):
    return why_not(step, Candidate("hopper_dgrad", candidate_config), SPACE)


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
    second, first = ("sum_to", "relu_grad", "sum_to"), ("add", "sum_to", "relu_grad")
    pooled, earliest = ("avg_pool2d_grad", *first), ("sum_to", "add", "relu_grad")
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


@pytest.mark.parametrize(
    ("emit", "dtype", "reason"),
    [
        (Gradient(), "float32", "float16 or bfloat16, got float32"),
        (Gradient(c=12), "float16", "do not start at 16 bytes"),
        (Gradient(groups=2), "float16", "without groups"),
        (Gradient(stride=3), "float16", "strides up to 2, got (3, 3)"),
        (Gradient(size=(1, 8), stride=2), "float16", "is smaller than the stride (2, 2)"),
        (Gradient(kernel=1, padding=1), "float16", "is not smaller than the kernel"),
        (Gradient(parts=("mul",)), "float16", "no place after the gradient"),
        (Gradient(parts=("itself",)), "float16", "no place after the gradient"),
        (Gradient(parts=("swapped",)), "float16", "no place after the gradient"),
        (Gradient(parts=("relu_grad", "add")), "float16", "no place after the gradient"),
        (Gradient(parts=("pool",)), "float16", "more than 2x2 windows"),
        (Gradient(parts=("all", "pool", "pool"), stride=2), "float16", "no place after the"),
        (Gradient(parts=("pool",), stride=2, counted=False), "float16", "count other pixels"),
        (Gradient(parts=("images",)), "float16", "sum at 'sum' has no place after the gradient"),
        (lambda b: Gradient(parts=("all",))(b)[1], "float16", "does not leave the step"),
        (
            Gradient(parts=("add", "relu_grad"), leaves="conv add"),
            "float16",
            "two values before the end",
        ),
        (
            lambda b: b.conv(b.x(2, 64, 8, 8), b.w(64, 64, 3, 3)),
            "float16",
            "not with an image's gradient",
        ),
    ],
)
def test_it_says_which_steps_it_does_not_run(step_of, emit, dtype, reason):
    assert reason in refusal(step_of(emit, dtype), config(64, 64))


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


@pytest.mark.parametrize("index", range(len(BUILT)))
def test_it_builds_without_spilling(step_of, build_within_limits, index):
    emit, chosen = BUILT[index]
    step = step_of(emit, "float16")
    assert refusal(step, chosen) is None
    build_within_limits(FAMILY, step, chosen, ARCH)


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


# Of the family whose weights stay in shared memory, with its stages.
RESIDENT = {
    "layer": (Gradient(5, 64, (16, 16), 64), 2),
    "second": (Gradient(129, 64, (16, 16), 64, parts=SECOND), 2),
    "second, two tiles": (Gradient(40, 128, (8, 8), 128, parts=SECOND), 1),
    "earliest": (Gradient(7, 64, (16, 16), 64, parts=EARLIEST, leaves="conv"), 1),
    "both": (Gradient(3, 72, (19, 13), 40, parts=MASKED, leaves="add"), 2),
    "channels": (
        Gradient(9, 72, (9, 8), 104, parts=("all", "channels", "relu_grad", "channels", "all")),
        1,
    ),
    "4x4": (Gradient(2, 24, (9, 7), 64, kernel=4, padding=1, parts=("channels",)), 1),
    "no padding": (Gradient(2, 64, (10, 17), 48, padding=0), 4),
    "one pixel": (Gradient(1, 8, (1, 1), 8, parts=("all",)), 1),
    "strided": (Gradient(129, 64, (16, 16), 128, stride=2, parts=POOLED), 3),
    "strided, odd": (Gradient(5, 64, (15, 17), 72, stride=2, parts=FIRST), 2),
    "strided, other channels": (Gradient(3, 72, (9, 22), 40, stride=2, parts=("pool",)), 1),
    "strided, no padding": (Gradient(2, 64, (10, 17), 64, stride=2, padding=0), 2),
    "strided, much padding": (
        Gradient(2, 64, (14, 14), 64, stride=2, padding=2, parts=("relu_grad", "channels")),
        1,
    ),
    "strided, 2x2": (Gradient(2, 24, (9, 8), 64, kernel=2, stride=2, padding=0, parts=MASKED), 1),
}
# With so many tiles that whole ones are brought and taken away.
STAGED = {
    "layer": (Gradient(270, 64, (16, 16), 64), 2),
    "second": (Gradient(270, 64, (16, 16), 64, parts=SECOND), 2),
    "second, two tiles": (Gradient(270, 128, (8, 8), 128, parts=SECOND), 2),
    "earliest": (Gradient(270, 64, (16, 16), 64, parts=EARLIEST, leaves="conv"), 1),
    "both": (Gradient(140, 72, (19, 13), 40, parts=MASKED, leaves="add"), 1),
    "channels": (
        Gradient(280, 72, (9, 8), 104, parts=("all", "channels", "relu_grad", "channels", "all")),
        1,
    ),
    "strided": (Gradient(540, 64, (16, 16), 128, stride=2, parts=POOLED), 2),
    "strided, odd": (Gradient(270, 64, (15, 17), 72, stride=2, parts=SECOND), 2),
    "strided, other channels": (Gradient(270, 72, (9, 22), 40, stride=2, parts=("pool",)), 1),
    "strided, no padding": (Gradient(270, 64, (10, 17), 64, stride=2, padding=0), 2),
    "strided, much padding": (
        Gradient(540, 64, (14, 14), 64, stride=2, padding=2, parts=("relu_grad", "channels")),
        1,
    ),
}


def cases():
    """Each family with what it is to run."""
    for name, (emit, chosen) in RUN.items():
        yield pytest.param(emit, Candidate("hopper_dgrad", chosen), id=name)
    for name, (emit, stages) in RESIDENT.items():
        chosen = Candidate("resident_dgrad", Attrs(stages=stages, threads=256))
        yield pytest.param(emit, chosen, id=f"resident, {name}")
    for name, (emit, stages) in STAGED.items():
        chosen = Candidate("resident_dgrad", Attrs(stages=stages, threads=256))
        yield pytest.param(emit, chosen, id=f"staged, {name}")
    for name in ("earliest", "both", "second"):
        chosen = Candidate("resident_dgrad", Attrs(stages=1, threads=384))
        yield pytest.param(RESIDENT[name][0], chosen, id=f"resident, {name}, three groups")


@pytest.mark.parametrize(("emit", "candidate"), list(cases()))
def test_what_is_to_run_is_legal(step_of, emit, candidate):
    assert why_not(step_of(emit, "float16"), candidate, SPACE) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("emit", "candidate"), list(cases()))
def test_it_is_right(step_of, assert_right, emit, candidate, dtype):
    assert_right(step_of(emit, dtype), candidate, SPACE)


@pytest.mark.parametrize(
    ("emit", "reason"),
    [
        (Gradient(stride=3), "with stride 1 or 2, got (3, 3)"),
        (Gradient(kernel=5, stride=2, padding=2), "has more than 2x2 taps"),
        (Gradient(o=128, stride=2), "phases read all 128 channels, 1 stages hold less"),
        (Gradient(kernel=1), "of a larger kernel"),
        (Gradient(o=256), "bytes of shared memory, a block has"),
    ],
)
def test_weights_stay_where_they_serve_many_pixels(step_of, emit, reason):
    chosen = Candidate("resident_dgrad", Attrs(stages=1, threads=256))
    assert reason in why_not(step_of(emit, "float16"), chosen, SPACE)


@pytest.mark.parametrize("parts", [SECOND, EARLIEST, ("add", "relu_grad", "channels"), POOLED])
def test_resident_weights_build_without_spilling(step_of, build_within_limits, parts):
    stride = 2 if parts == POOLED else 1
    emit = Gradient(128, 64, (16, 16), 64 * stride, stride=stride, parts=parts)
    step = step_of(emit, "float16")
    build_within_limits(RESIDENT_FAMILY, step, Attrs(stages=2, threads=256), ARCH)


@pytest.mark.parametrize("name", STAGED)
def test_what_many_tiles_read_and_write_is_staged(step_of, build_within_limits, name):
    emit, stages = STAGED[name]
    step, chosen = step_of(emit, "float16"), Attrs(stages=stages, threads=256)
    design = RESIDENT_FAMILY.design(RESIDENT_FAMILY.parts(step), chosen)
    assert design.staged > 0
    assert design.kernel[1].endswith("Staged")
    build_within_limits(RESIDENT_FAMILY, step, chosen, ARCH)


@pytest.mark.parametrize(
    ("emit", "stages"),
    [
        (Gradient(129, 64, (16, 16), 64, parts=SECOND), 2),  # few tiles
        (Gradient(270, 64, (16, 16), 64, parts=EARLIEST), 3),  # no room
        (Gradient(540, 64, (16, 16), 128, stride=2, parts=FIRST), 2),  # a residual of phases
    ],
)
def test_what_else_is_read_and_written_by_threads(step_of, emit, stages):
    parts = RESIDENT_FAMILY.parts(step_of(emit, "float16"))
    design = RESIDENT_FAMILY.design(parts, Attrs(stages=stages, threads=256))
    assert design.staged == 0
