"""Convolutions by tensor copies: what they refuse, how they cut images, that they build and run."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.errors import IllegalCandidate
from plantune.graph.layouts import aligned
from plantune.graph.types import TensorType
from plantune.kernels.families.hopper_conv import FAMILY
from plantune.kernels.family import Candidate, Frame
from plantune.kernels.hopper.launch import images_read, placing, placing_bytes
from plantune.kernels.hopper.tiles import Box, conv_shape, copied_pixels, dense_box, reused_box
from plantune.kernels.patterns.epilogue import conv_epilogue
from plantune.kernels.registry import why_not
from plantune.plans.checked_plan import check_plan
from plantune.plans.guess import guessed_plan
from plantune.runtime.program.schedule import make_schedule
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

from .conftest import DTYPES, LAYERS
from .contract import Contract
from .epilogues import ended

ARCH = load_arch("sm90")
SPACE = load_search_space("sm90")
PARTS = ("scalar", "bias", "residual", "relu", "unshifted", "offset")


@dataclass(frozen=True)
class Conv:
    """A convolution and the named parts of an epilogue."""

    n: int = 2
    c: int = 64
    size: tuple[int, int] = (8, 8)
    o: int = 64
    kernel: int = 3
    stride: int = 1
    padding: int | None = None
    groups: int = 1
    parts: tuple[str, ...] = PARTS

    def __call__(self, b):
        padding = self.kernel // 2 if self.padding is None else self.padding
        w = b.w(self.o, self.c // self.groups, self.kernel, self.kernel)
        geometry = {"stride": (self.stride, self.stride), "padding": (padding, padding)}
        x = b.x(self.n, self.c, *self.size)
        y = b.conv(x, w, groups=self.groups, **geometry)
        return ended(b, x, y, self.parts)


def layer(index, n=128, parts=()):
    c, size, o, stride = LAYERS[index]
    return Conv(n, c, (size, size), o, stride=stride, parts=parts)


def config(tile_m, tile_n, stages=4, split_k=1, reuse=False, blocks_per_sm=1):
    return Attrs(
        tile_m=tile_m,
        tile_n=tile_n,
        stages=stages,
        split_k=split_k,
        reuse=reuse,
        blocks_per_sm=blocks_per_sm,
    )


def shape_of(step):
    return conv_shape(step, conv_epilogue(step, unshifted=True))


def refusal(step, candidate_config):
    return why_not(step, Candidate("hopper_conv", candidate_config), SPACE)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("index", range(len(LAYERS)))
def test_each_layer_has_configs(step_of, index, dtype):
    step = step_of(layer(index, parts=PARTS), dtype)
    assert FAMILY.why_not_step(step) is None
    legal = [
        c
        for c in FAMILY.configs(SPACE)
        if FAMILY.why_not_config(FAMILY.parts(step), c, ARCH) is None
    ]
    assert 10 <= len(legal) <= 400
    times = [FAMILY.estimate_us(FAMILY.parts(step), c, ARCH) for c in legal]
    assert all(2 < time < 1000 for time in times)


def test_other_archs_have_no_warpgroup_products():
    assert "wgmma" in FAMILY.why_not_arch(load_arch("sm80"))
    assert "wgmma" in FAMILY.why_not_arch(load_arch("sm100"))
    assert "wgmma" in FAMILY.why_not_arch(load_arch("sm120"))
    assert FAMILY.why_not_arch(load_arch("cpu")) is not None
    assert FAMILY.why_not_arch(ARCH) is None


@pytest.mark.parametrize(
    ("size", "n", "box"),
    [
        ((2, 2), 128, Box(1, 1, 128)),  # 4 of 9 taps read something
        ((2, 2), 1, Box(2, 2, 1)),
        ((7, 7), 2, Box(7, 7, 2)),
        ((56, 56), 1, Box(14, 8, 1)),
    ],
)
def test_boxes_leave_the_least_to_do(step_of, size, n, box):
    shape = shape_of(step_of(Conv(n, size=size), "float16"))
    got = dense_box(shape, 128)
    assert shape.tiles(got) * shape.taps(got)[0] == shape.tiles(box) * shape.taps(box)[0]
    assert got.w * got.h * got.n <= 128


@pytest.mark.parametrize("tile_m", [64, 128, 256])
@pytest.mark.parametrize("size", [(1, 1), (3, 5), (7, 7), (16, 16), (31, 64), (112, 112)])
def test_tiles_cover_the_output(step_of, tile_m, size):
    shape = shape_of(step_of(Conv(3, size=size), "float16"))
    for box in (dense_box(shape, tile_m), reused_box(shape, tile_m)):
        assert box.w * box.h * box.n <= tile_m
        assert shape.tiles(box) * box.w * box.h * box.n >= 3 * size[0] * size[1]


def test_a_box_that_taps_share_has_little_margin(step_of):
    shape = shape_of(step_of(layer(0), "float16"))
    box = reused_box(shape, 256)
    assert box == Box(16, 16, 1)
    assert copied_pixels(shape, box, reuse=True) == 18 * 18


def test_taps_that_read_padding_alone_are_not_counted(step_of):
    shape = shape_of(step_of(layer(6), "float16"))
    assert shape.taps(Box(1, 1, 128)) == (4, 16)
    assert shape.taps(Box(2, 2, 32)) == (9, 9)


BUILT = [
    (layer(0, parts=PARTS), config(256, 64, 8, reuse=True)),
    (layer(1, parts=("bias", "relu", "offset")), config(64, 128, 6)),
    (layer(4, parts=PARTS), config(64, 128, 6, split_k=2)),
    (layer(6, parts=PARTS), config(128, 64, 4, split_k=8)),
    (layer(6), config(64, 256, 4)),
]


@pytest.mark.parametrize("tile_m", [64, 128])
def test_an_sm_has_registers_for_all_blocks_that_are_planned(step_of, build_within_limits, tile_m):
    """Left alone, the assembler takes more for a scale and a residual: two blocks instead of three
    ran at once, and layers of resnet18 took 11.5 us instead of 9.5 (batch 16, H200, 2026-11-22).
    """
    parts = ("scalar", "bias", "residual", "relu")
    step = step_of(Conv(16, size=(56, 56), parts=parts), "float16")
    chosen = config(tile_m, 64, 4, reuse=True, blocks_per_sm=3)
    assert refusal(step, chosen) is None
    used = build_within_limits(FAMILY, step, chosen, ARCH)["run"]
    of_warp = -(-used.registers * 32 // 256) * 256
    warps = 3 * FAMILY.threads(FAMILY.parts(step), chosen) // 32
    assert of_warp * warps <= ARCH.cuda.registers_per_sm


def test_every_tile_is_compiled_as_planned(step_of):
    """The kernel asserts its threads and shared memory against the plan's."""
    step = step_of(Conv(3, 200, (9, 9), 72, kernel=5, parts=PARTS), "float16")
    for chosen in (config(64, 64, 4, split_k=4, reuse=True), config(128, 128, 4, blocks_per_sm=1)):
        assert refusal(step, chosen) is None
        assert FAMILY.build(FAMILY.parts(step), chosen, ARCH).usage["run"].registers <= 168


def test_no_box_no_kernel(step_of):
    step = step_of(Conv(1, size=(8, 8), kernel=255, padding=127, parts=()), "float16")
    assert "can be copied at once" in refusal(step, config(128, 64, reuse=True))
    with pytest.raises(IllegalCandidate, match="can be copied at once"):
        FAMILY.shared_bytes(FAMILY.parts(step), config(128, 64, reuse=True), ARCH)


RUN = {
    **{f"layer {i}": (layer(i, n=3, parts=PARTS), config(64, 64)) for i in range(len(LAYERS))},
    "reuse": (Conv(3, 128, (16, 16), 128), config(128, 128, 4, reuse=True)),
    "reuse, ragged": (Conv(3, 72, (14, 9), 40), config(64, 64, 4, reuse=True)),
    "two blocks": (layer(4, n=7, parts=PARTS), config(64, 128, 6, split_k=2)),
    "eight blocks": (layer(6, n=7, parts=PARTS), config(128, 64, 4, split_k=8)),
    "1x1": (Conv(3, 96, (9, 9), 72, kernel=1), config(64, 64, 3)),
    "stride 2": (Conv(3, 64, (9, 7), 64, stride=2), config(64, 64)),
    "7x7": (Conv(2, 8, (31, 29), 64, kernel=7, stride=2), config(128, 64)),
    # After the ring of a tile so large there is room for one output alone.
    "wide": (Conv(2, 64, (8, 8), 256, parts=PARTS[:4]), config(128, 256, 3)),
    "wide, two outputs": (Conv(2, 64, (8, 8), 256), config(64, 256, 3)),
    "added to its input": (Conv(parts=("bias", "input", "relu")), config(64, 64)),
    "no epilogue": (Conv(2, 64, (8, 8), 64, parts=()), config(64, 64)),
}


# With so many tiles that blocks stay.
STAYING = {
    "staying": (Conv(130, 64, (16, 16), 64), config(128, 64)),
    "staying, reuse": (Conv(130, 128, (16, 16), 128), config(128, 128, 3, reuse=True)),
    "staying, apart": (Conv(130, 64, (16, 16), 64, parts=("relu", "apart")), config(128, 64)),
    "staying, ragged": (Conv(100, 72, (14, 9), 40), config(64, 64)),
    "staying, no epilogue": (Conv(130, 64, (16, 16), 64, parts=()), config(128, 64)),
}
RUN |= STAYING


@pytest.mark.parametrize("name", STAYING)
def test_blocks_stay_where_tiles_are_many(step_of, name):
    emit, chosen = STAYING[name]
    assert FAMILY.design(FAMILY.parts(step_of(emit, "float16")), chosen).persistent


@pytest.mark.parametrize("blocks_per_sm", [1, 2])
def test_few_tiles_or_several_blocks_of_an_sm_come_and_go(step_of, blocks_per_sm):
    step = step_of(Conv(130 if blocks_per_sm == 2 else 20, 64, (16, 16), 64), "float16")
    chosen = config(128, 64, blocks_per_sm=blocks_per_sm)
    design = FAMILY.design(FAMILY.parts(step), chosen)
    assert not design.persistent
    assert design.launched == design.blocks


@pytest.mark.parametrize("ends", [(), ("residual",), ("input",)])
def test_every_image_that_is_read_is_placed(step_of, ends):
    step = step_of(Conv(parts=ends), "float16")
    parts = FAMILY.parts(step)
    like = torch.empty(2, 64, 8, 8, dtype=torch.float16, memory_format=torch.channels_last)
    values = {name: torch.empty_like(like) for name, _ in step.inputs}
    room = torch.empty(placing_bytes(parts), dtype=torch.uint8)
    *found, copied = placing(parts, Frame(values, room, None, room.device))(0)
    assert not copied
    assert [image.data_ptr() for image in found] == [
        values[name].data_ptr() for name in images_read(parts)
    ]
    assert len(found) == 1 + len(ends)


def test_a_programs_own_images_need_no_room_for_copies(graph_of):
    """A caller's may be anywhere; they were 730 of the 1,884 MiB of a training pass."""

    def emit(b):
        x = b.graph.input("x", TensorType((2, 64, 8, 8), "float16", "nhwc"))
        return b.conv(b.conv(x, b.w(64, 64, 1, 1)), b.w(64, 64, 1, 1))

    graph = graph_of(emit, "float16")
    plan = guessed_plan(graph, SPACE, network="test")
    first, second = make_schedule(check_plan(plan, graph, SPACE)).launches
    assert {launch.family.name for launch in (first, second)} == {"hopper_conv"}
    assert first.workspace_bytes == aligned(graph.types["x"].size_bytes)
    assert second.workspace_bytes == 0
    values = {name: torch.empty(type_.shape) for name, type_ in second.step.inputs}
    frame = Frame(values, None, None, torch.device("cpu"), aligned=second.aligned)
    found, copied = placing(second.parts, frame)(0)
    assert found is values["conv2d"]
    assert not copied


REFUSED = {
    "float32": (Conv(), "float16 or bfloat16, got float32", "float32"),
    "odd channels": (Conv(c=12), "do not start at 16 bytes"),
    "odd outputs": (Conv(o=20), "do not start at 16 bytes"),
    "groups": (Conv(groups=2), "without groups"),
    "far steps": (Conv(size=(90, 90), stride=9, parts=()), "at most 8 pixels"),
    "another op": (
        lambda b: b("affine", Conv(parts=())(b), alpha=2.0, beta=0.0),
        "no place in the epilogue",
    ),
}
SINGLE = Conv(kernel=1, parts=())


class TestContract(Contract):
    family, chosen, refused = FAMILY, RUN, REFUSED
    dtypes = ("float16", "bfloat16")
    configs = (
        (layer(2), config(256, 256), "more than 128 registers"),
        (layer(2), config(128, 256), "half of the tile's channels"),
        (layer(1), config(128, 64, reuse=True), "with stride 1 read the same pixels"),
        (SINGLE, config(64, 64, 3, reuse=True), "of a larger kernel"),
        (SINGLE, config(64, 64, 3, split_k=2), "1 steps are too few"),
        (SINGLE, config(64, 64, 4), "no more than 1 steps to load"),
        (layer(6), config(128, 256, 8), "bytes of shared memory"),
        (Conv(2, 64, (8, 8), 256), config(128, 256, 3), "bytes of shared memory"),
        (layer(6), config(128, 128, 4, blocks_per_sm=2), "do not fit an SM"),
    )
    builds_chosen = tuple((*built, dtype) for built in BUILT for dtype in DTYPES[:2])

    def check_usage(self, step, config, usage):
        assert usage["run"].shared_bytes == 0
