"""The convolution of an image of few channels: what it refuses, that it builds, packs and runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.kernels.families.first_conv import FAMILY, read_constants
from plantune.kernels.family import Frame
from plantune.space.arch import load_arch

from .conftest import DTYPES
from .contract import Contract

ARCH = load_arch("sm90")
POOL = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1)}


@dataclass(frozen=True)
class First:
    """ResNet's first layers; other sizes, and parts that are missing, where a test says so."""

    n: int = 2
    c: int = 3
    size: tuple[int, int] = (224, 224)
    o: int = 64
    kernel: tuple[int, int] = (7, 7)
    stride: tuple[int, int] = (2, 2)
    padding: tuple[int, int] = (3, 3)
    dilation: tuple[int, int] = (1, 1)
    parts: tuple[str, ...] = ("bias", "relu", "pool")

    def __call__(self, b):
        geometry = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
        y = b.conv(b.x(self.n, self.c, *self.size), b.w(self.o, self.c, *self.kernel), **geometry)
        if "scale" in self.parts:
            y = b("mul_channel", y, b.w(self.o), axis=1)
        if "bias" in self.parts:
            y = b("add_channel", y, b.w(self.o), axis=1)
        if "residual" in self.parts:
            y = b("add", y, b.x(*b.graph.types[y].shape))
        before = y = b("relu", y) if "relu" in self.parts else y
        if "offset" in self.parts:
            y = b("add", y, b.w(1))
        if "pool" in self.parts:
            y = b("max_pool2d", y, **POOL)
        if "wide pool" in self.parts:
            y = b("max_pool2d", y, **{**POOL, "padding": (0, 0)})
        return (before, y) if "before" in self.parts else y


def config(layout="nchw", rows=4, threads=384):
    return Attrs(layout=layout, rows=rows, threads=threads)


STEM = First()
CIFAR = First(size=(32, 32), kernel=(3, 3), stride=(1, 1), padding=(1, 1), parts=("bias", "relu"))


def test_other_archs_have_no_warpgroup_products():
    assert "wgmma" in FAMILY.why_not_arch(load_arch("sm80"))
    assert "wgmma" in FAMILY.why_not_arch(load_arch("sm100"))
    assert FAMILY.why_not_arch(ARCH) is None


@pytest.mark.parametrize("parts", [(), ("pool",)])
@pytest.mark.parametrize("width", [1, 7, 97, 224, 225, 256, 257, 511, 1000])
def test_columns_cover_a_row(step_of, width, parts):
    step = step_of(replace(STEM, size=(32, width), parts=parts), "float16")
    design = FAMILY.design(FAMILY.parts(step), config())
    move = design.columns - (2 if parts else 0)
    assert design.columns % 8 == 0
    assert design.columns <= 128
    assert (design.tiles_w - 1) * move + design.columns >= design.conv[3]


def packed_of(step):
    """What the kernel reads of random constants, and these."""
    values = {name: torch.randn(step.types[name].shape).half() for name in step.constants}
    parts = FAMILY.parts(step)
    packed = read_constants(parts, FAMILY.design(parts, config()), Frame(values))
    for constant in packed.all:
        constant.fill()
    return packed, values


def test_a_packed_weight_has_each_value_once(step_of):
    packed, values = packed_of(step_of(replace(STEM, o=70), "float16"))
    weight = packed.all[0]
    w = values[weight.name]
    tiles = weight.tensor.view(2, 7, 2, 2, 64, 8)
    # Channel 64 + 5 is row 2 of the upper half; tap 5 the second of the second step's first half.
    assert torch.equal(tiles[1, 3, 1, 0, 8 + 2, 4:7], w[69, :, 3, 5])
    assert tiles.count_nonzero() == w.count_nonzero()
    assert weight.memory is packed.tensor("weight")


def test_scales_and_biases_are_padded_with_zeros(step_of):
    parts = ("scale", "bias")
    packed, values = packed_of(step_of(replace(STEM, o=70, parts=parts), "float16"))
    _, *vectors = packed.all
    assert len(vectors) == 2
    for vector in vectors:
        assert torch.equal(vector.tensor, values[vector.name].float())
        whole = vector.tensor.as_strided((128,), (1,))
        assert not whole[70:].any()


def test_a_scalar_scales_every_channel(step_of):
    def emit(b):
        y = b.conv(b.x(2, 3, 16, 16), b.w(6, 3, 3, 3), padding=(1, 1))
        return b("mul", y, b.w(1))

    packed, values = packed_of(step_of(emit, "float16"))
    scale = packed.all[1]
    assert torch.equal(scale.tensor, values[scale.name].float().expand(6))


SCALED = ("scale", "bias", "relu", "pool")
# Threads and rows, and what replayed launches took on an H200, in us (2026-11-22).
MEASURED = {
    16: {
        128: {4: 19.0, 5: 17.5, 7: 14.5, 8: 15.7, 10: 18.7, 14: 24.5, 28: 45.2},
        384: {4: 21.8, 5: 26.1, 7: 34.7, 8: 38.9, 10: 47.3, 14: 64.6, 28: 124.0},
    },
    64: {
        128: {4: 57.1, 5: 49.9, 7: 54.5, 8: 55.7, 10: 45.0, 14: 55.6, 28: 60.1},
        384: {4: 70.3, 5: 57.1, 7: 69.4, 8: 76.4, 10: 49.6, 14: 65.5, 28: 120.3},
    },
}


@pytest.mark.parametrize("batch", MEASURED)
def test_the_guess_finds_the_fastest_config(step_of, batch):
    step = step_of(replace(STEM, n=batch, parts=SCALED), "float16")
    guesses = {
        us: FAMILY.estimate_us(FAMILY.parts(step), config(rows=rows, threads=threads), ARCH)
        for threads, measured in MEASURED[batch].items()
        for rows, us in measured.items()
    }
    assert min(guesses, key=guesses.__getitem__) == min(guesses)
    assert all(0.6 < guess / us < 1.4 for us, guess in guesses.items())


BUILT = [(STEM, config(rows=7)), (CIFAR, config("nhwc", rows=8)), (STEM, config(threads=128))]
BUILT += [
    (replace(STEM, parts=SCALED), config(rows=7)),
    (replace(CIFAR, parts=("scale", "bias", "relu")), config("nhwc", rows=8)),
]


RUN = {
    "stem": (STEM, config(rows=7)),
    "nhwc": (STEM, config("nhwc", rows=14, threads=128)),
    "225": (replace(STEM, size=(225, 225)), config(rows=8)),
    "97": (replace(STEM, n=5, size=(97, 97)), config("nhwc", threads=128)),
    "one image": (replace(STEM, n=1, size=(64, 48)), config()),
    "flat": (replace(STEM, size=(5, 130)), config()),
    "narrow": (replace(STEM, size=(40, 3)), config(rows=7)),
    "two tiles": (replace(STEM, n=1, size=(31, 300)), config()),
    "two tiles, odd": (replace(STEM, n=1, size=(30, 401)), config("nhwc")),
    "no epilogue": (replace(STEM, size=(33, 41), parts=("pool",)), config()),
    "no pool": (replace(STEM, size=(33, 41), parts=("bias", "relu")), config()),
    "no pool, two tiles": (replace(STEM, size=(17, 270), parts=("bias",)), config("nhwc")),
    "channels": (replace(STEM, size=(40, 40), o=150), config()),
    "few channels": (replace(STEM, c=1, size=(40, 40), o=6), config()),
    "cifar": (CIFAR, config(rows=8)),
    "cifar with pool": (replace(CIFAR, parts=("bias", "relu", "pool")), config("nhwc")),
    "eight channels": (replace(CIFAR, c=8, kernel=(5, 3)), config("nhwc")),
    "stride 4": (replace(STEM, c=2, kernel=(11, 9), stride=(4, 4), size=(64, 64)), config()),
    "uneven": (replace(STEM, kernel=(3, 5), stride=(1, 2), padding=(0, 2)), config(rows=28)),
    "scaled": (replace(STEM, parts=SCALED), config(rows=7)),
    "scaled, odd columns": (replace(STEM, size=(97, 97), parts=SCALED), config("nhwc", rows=8)),
    "scaled, no bias": (replace(STEM, size=(40, 40), parts=("scale", "pool")), config()),
    "scaled, no pool": (replace(CIFAR, parts=("scale", "bias", "relu")), config(rows=8)),
    "scaled channels": (replace(STEM, size=(40, 40), o=70, parts=SCALED), config("nhwc")),
}


ONLY = "only a scale, a bias and functions"
REFUSED = {
    "float32": (STEM, "float16 or bfloat16, got float32", "float32"),
    "dilation": (replace(STEM, dilation=(2, 2)), "without groups and dilation"),
    "stride 3": (replace(STEM, stride=(2, 3)), "a stride of 1, 2 or 4, got 3"),
    "five channels": (replace(STEM, c=5), "2 pixels of 5 channels take more than 16 bytes"),
    "nine channels": (replace(CIFAR, c=9), "1 pixels of 9 channels take more than 16 bytes"),
    "odd outputs": (replace(STEM, o=63), "63 do not divide"),
    "a residual": (replace(STEM, parts=("bias", "residual")), ONLY),
    "an offset": (replace(STEM, parts=("relu", "offset")), ONLY),
    "another pool": (replace(STEM, parts=("bias", "wide pool")), "only a pool of 3x3"),
    "an early value": (replace(STEM, parts=("bias", "pool", "before")), "read outside of it"),
    "places of a pool": (
        lambda b: b.graph.emit("max_pool2d", CIFAR(b), **POOL),
        "read outside of it",
    ),
    "a pool alone": (
        lambda b: b("max_pool2d", b.x(2, 3, 8, 8), **POOL),
        "not with a convolution",
    ),
    "two pools": (lambda b: b("max_pool2d", STEM(b), **POOL), "has no place"),
}


class TestContract(Contract):
    family, chosen, refused = FAMILY, RUN, REFUSED
    dtypes = ("float16", "bfloat16")
    configs = (
        (
            replace(STEM, size=(24, 24)),
            config(rows=14),
            "14 rows are far more than the 6",
        ),
        (replace(STEM, size=(24, 24)), config(rows=8), None),
    )
    # Products do not wait for each other.
    builds_chosen = tuple((*built, dtype) for built in BUILT for dtype in DTYPES[:2])

    def kernels(self, step, config):
        return {"run"}
