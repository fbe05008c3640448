"""Gradients of stems' weights: which steps, where sums are, that they build and are right."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from plantune.canonical import Attrs
from plantune.graph.fusions import fusions_named
from plantune.graph.partition import alternatives
from plantune.graph.types import TensorType
from plantune.kernels.families.se_resnet9.stem_wgrad import FAMILY
from plantune.kernels.registry import candidates
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

CONFIG = Attrs(threads=256, stages=2, blocks=132)
ARCHS = ("sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm120")
POINTWISE = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}


@dataclass(frozen=True)
class Gradient:
    """The sizes of a stem, and what its image goes through."""

    n: int = 2
    channels: int = 3
    height: int = 64
    width: int = 64
    outputs: int = 64
    block: int = 4
    pixels: str = ""
    """The dtype of the images, where it is another one."""
    scale: str = ""

    def __call__(self, b):
        return self.with_moved(b)[1]

    def with_moved(self, b):
        shape, block = (self.n, self.channels, self.height, self.width), self.block
        if self.pixels:
            x = b("cast", b.graph.input("x0", TensorType(shape, self.pixels)), dtype=b.dtype)
        else:
            x = b.x(*shape)
        moved = b("space_to_depth", self.scaled(b, x), block=block)
        dy = b.x(self.n, self.outputs, self.height // block, self.width // block)
        weight = (self.outputs, self.channels * block**2, 1, 1)
        return moved, b("conv2d_wgrad", dy, moved, shape=weight, **POINTWISE)

    def scaled(self, b, x):
        if self.scale == "number":
            return b("affine", x, alpha=1 / 255, beta=0.0)
        if self.scale == "tensors":
            return b("div", b("sub", x, b.w(self.channels, 1, 1)), b.w(1, self.channels, 1, 1))
        return x


BYTES, FLOATS = {"pixels": "uint8"}, {"pixels": "float32"}
VARIANTS = {
    "colour": Gradient(7),
    "colour and depth": Gradient(3, 11),
    "raw depth": Gradient(3, 1),
    "many channels": Gradient(1, 13, 8, 16, 32),
    "odd rows of patches": Gradient(3, 2, 12, 28, 40),
    "one patch": Gradient(1, 5, 4, 4, 8),
    "wide": Gradient(1, 3, 8, 84, 136),
    "bytes": Gradient(**BYTES, scale="number"),
    "bytes as they are": Gradient(**BYTES),
    "bytes by channel": Gradient(3, 4, 12, 28, **BYTES, scale="tensors"),
    "bytes of games": Gradient(2, 4, 84, 84, 32, **BYTES, scale="number"),
    "floats": Gradient(**FLOATS, scale="number"),
    "floats as they are": Gradient(3, 11, **FLOATS),
    "scaled as they are": Gradient(scale="number"),
    "of another half": Gradient(pixels="bfloat16", scale="number"),
}


def test_it_reads_every_variant(step_of):
    for name, gradient in VARIANTS.items():
        step = step_of(gradient, "float16")
        assert FAMILY.why_not_step(step) is None, name
        assert FAMILY.layouts(FAMILY.parts(step), CONFIG) == {
            "x0": "nchw",
            FAMILY.parts(step).node.inputs[0]: "nhwc",
        }


@pytest.mark.parametrize("name", ["colour", "bytes by channel"])
def test_the_shipped_fusions_offer_the_whole_step(graph_of, name):
    graph = graph_of(VARIANTS[name], "float16")
    offered = alternatives(graph, fusions_named("stem_wgrad", "image_stem_wgrad"))
    (whole,) = [step for step in offered if len(step.nodes) == len(graph.nodes)]
    assert FAMILY.why_not_step(whole) is None


def strided(b):
    moved = b("space_to_depth", b.x(2, 3, 16, 16), block=4)
    strides = {**POINTWISE, "stride": (2, 2)}
    return b("conv2d_wgrad", b.x(2, 8, 2, 2), moved, shape=(8, 48, 1, 1), **strides)


def of_the_result(b):
    """The moved image is what the gradient of the other one is multiplied with."""
    moved = b("space_to_depth", b.x(2, 3, 16, 16), block=4)
    return b("conv2d_wgrad", moved, b.x(2, 8, 4, 4), shape=(48, 8, 1, 1), **POINTWISE)


@pytest.mark.parametrize(
    ("emit", "reason"),
    [
        (lambda b: b("relu", b.x(2, 3, 8, 8)), "not the gradient of a convolution after"),
        (lambda b: Gradient().with_moved(b), "read outside of it"),
        (strided, "only a 1x1 convolution of stride 1"),
        (of_the_result, "the image of"),
        (Gradient(block=2), "patches are 4x4, got 2"),
        (Gradient(outputs=20), "reads 8 outputs at once, 20 do not divide"),
        (Gradient(pixels="int64"), "the kernel reads float16, bfloat16, float32, uint8, got int64"),
        (Gradient(n=0), "counted in 30 bits, got 0"),
    ],
)
def test_what_it_does_not_read_is_refused_with_the_reason(step_of, emit, reason):
    assert reason in FAMILY.why_not_step(step_of(emit, "float16"))


@pytest.mark.parametrize(
    ("gradient", "dtype", "arch", "changed", "reason"),
    [
        (Gradient(), "float32", "sm90", {}, "not float32"),
        (Gradient(), "float16", "sm70", {}, "sm70 have no products of 16 by 8"),
        (Gradient(), "bfloat16", "sm75", {}, "have no bfloat16"),
        (Gradient(channels=33), "float16", "sm90", {"threads": 256}, "33 channels take 11 warps"),
        (Gradient(channels=24), "float16", "sm75", {}, "bytes of shared memory"),
    ],
)
def test_illegal_configs_have_reasons(step_of, gradient, dtype, arch, changed, reason):
    parts = FAMILY.parts(step_of(gradient, dtype))
    assert reason in FAMILY.why_not_config(parts, Attrs(CONFIG, **changed), load_arch(arch))


def sums_of(output: int, value: int, channels: int, of_warp: int) -> tuple[int, ...]:
    """Which warp, lane and register makes a sum: as StemWgrad::multiply orders the operands, and as
    an instruction of 16 rows and 8 columns leaves its sums.
    """
    row, column, channel = value // channels // 4, value // channels % 4, value % channels
    product = (channel % of_warp * 2 + column % 2) * 4 + output % 8 // 2
    second_row, n = output % 2, row + column // 2 * 4
    return channel // of_warp, output // 8 * 4 + n // 2, product * 4 + second_row * 2 + n % 2


def place_of_sum(output: int, value: int, channels: int, of_warp: int) -> int:
    """StemWgrad::place_of_sum."""
    channel, row, column = value % channels, value // channels // 4, value // channels % 4
    lane = output // 8 * 4 + column // 2 * 2 + row // 2
    product = channel % of_warp * 2 + column % 2
    vector = (channel // of_warp * of_warp * 2 + product) * 4
    return ((vector + output % 8 // 2) * 32 + lane) * 4 + output % 2 * 2 + row % 2


@pytest.mark.parametrize("channels", [1, 3, 11, 16])
def test_sums_are_read_where_lanes_put_them(step_of, channels):
    parts = FAMILY.parts(step_of(Gradient(channels=channels), "float16"))
    of_warp, places = parts.channels_of_warp, set()
    for output, value in itertools.product(range(64), range(16 * channels)):
        share, lane, register = sums_of(output, value, channels, of_warp)
        # StemWgrad::add_teams: 4 sums of a lane side by side, then those of the lanes.
        put = ((share * of_warp * 8 + register // 4) * 32 + lane) * 4 + register % 4
        assert put == place_of_sum(output, value, channels, of_warp)
        places.add(put)
    assert len(places) == 64 * 16 * channels
    assert max(places) < parts.shared_bytes // 4


def test_small_problems_leave_no_block_without_pixels(step_of):
    parts = FAMILY.parts(step_of(Gradient(1), "float16"))
    assert parts.sum(CONFIG).parts == 2  # 16 products of 16 pixels, 8 warps
    assert FAMILY.workspace_bytes(parts, CONFIG) == 2 * 64 * 48 * 4


@pytest.mark.parametrize("arch", ARCHS)
def test_each_arch_has_configs_for_each_variant(step_of, arch):
    space = load_search_space(arch)
    for name, gradient in VARIANTS.items():
        assert candidates(step_of(gradient, "float16"), space, ["stem_wgrad"]), name


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ["colour", "bytes by channel"])
def test_it_builds_within_its_limits(step_of, build_within_limits, arch, name):
    step = step_of(VARIANTS[name], "float16")
    assert set(build_within_limits(FAMILY, step, CONFIG, load_arch(arch))) == {"run", "sum"}


def test_colour_and_depth_leave_registers(step_of, build_within_limits):
    build_within_limits(
        FAMILY, step_of(Gradient(channels=11), "float16"), CONFIG, load_arch("sm90")
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_it_is_right(step_of, assert_legal_configs_right, name, dtype):
    assert_legal_configs_right(FAMILY, step_of(VARIANTS[name], dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 7, 128, 129])
@pytest.mark.parametrize("channels", [3, 11])
def test_every_count_of_images_is_right(step_of, assert_legal_configs_right, channels, n):
    assert_legal_configs_right(FAMILY, step_of(Gradient(n, channels), "float16"))
