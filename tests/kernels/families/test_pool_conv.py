"""A pool and its convolution in one kernel: what it reads, its memory, that it is right."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from plantune.base.canonical import Attrs
from plantune.graph.fusions import fusions_named
from plantune.graph.partition import alternatives
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.kernels.families.pool_conv import FAMILY
from plantune.kernels.registry import candidates
from plantune.models.se_resnet9 import SEResNet9Fixup
from plantune.space.search_space import load_search_space

from .contract import Contract

CONFIG = Attrs(tile_m=16, tile_n=64)


@dataclass(frozen=True)
class Pool:
    """The sizes of a pool, of the convolution after it, and its bias."""

    n: int = 2
    channels: int = 64
    outputs: int = 128
    image: tuple[int, int] = (16, 16)
    kernel: tuple[int, int] = (3, 3)
    stride: tuple[int, int] = (2, 2)
    padding: tuple[int, int] = (1, 1)
    count_padding: bool = True
    bias: str = ""
    outside: bool = False

    def __call__(self, b):
        window = {"kernel": self.kernel, "stride": self.stride, "padding": self.padding}
        x = b.x(self.n, self.channels, *self.image)
        pooled = b("avg_pool2d", x, **window, count_padding=self.count_padding)
        y = b.conv(pooled, b.w(self.outputs, self.channels, 1, 1))
        if self.bias == "channel":
            y = b("add_channel", y, b.w(self.outputs), axis=1)
        elif self.bias == "scalar":
            y = b("add", y, b.w(1))
        return (pooled, y) if self.outside else y


# The three downsampling blocks of SE-ResNet9-Fixup.
BLOCKS = {
    "block 1": Pool(),
    "block 2": Pool(2, 128, 256, (8, 8)),
    "block 3": Pool(2, 256, 512, (4, 4)),
}
VARIANTS = {
    **BLOCKS,
    "bias": Pool(bias="channel"),
    "scalar bias": Pool(bias="scalar"),
    "padding is not counted": Pool(3, 24, 72, (7, 9), count_padding=False, bias="channel"),
    "no padding": Pool(3, 40, 64, (6, 8), (2, 2), (2, 2), (0, 0)),
    "large windows": Pool(2, 8, 8, (11, 9), (5, 4), (3, 2), (2, 1)),
    "one window": Pool(1, 16, 8, (3, 3), (3, 3), (1, 1), (0, 0)),
    "windows that overlap": Pool(1, 48, 40, (5, 6), (3, 3), (1, 1), (1, 1)),
    "global": Pool(5, 32, 16, (7, 7), (7, 7), (7, 7), (0, 0)),
    "kept": Pool(3, outside=True),
    "kept, odd": Pool(3, 24, 72, (7, 9), count_padding=False, bias="channel", outside=True),
    "kept, many channels": Pool(7, 256, 512, (4, 4), outside=True),
}


def test_the_network_offers_each_downsampling_block():
    graph = extract(SEResNet9Fixup().half().eval(), TensorType((2, 3, 64, 64), "float16"))
    steps = alternatives(graph, fusions_named("pool_conv"))
    covered = [step for step in steps if FAMILY.why_not_step(step) is None]
    assert [step.ops for step in covered] == [("avg_pool2d", "conv2d")] * len(BLOCKS)


def of_a_weight(b):
    """Its mean does not change between calls; constants are in nchw."""
    window = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0), "count_padding": True}
    return b.conv(b("avg_pool2d", b.w(2, 64, 8, 8), **window), b.w(128, 64, 1, 1))


def test_in_training_the_pooled_images_leave():
    network = extract(SEResNet9Fixup().half(), TensorType((2, 3, 64, 64), "float16"))
    steps = alternatives(differentiate(network), fusions_named("pool_conv"))
    covered = [FAMILY.parts(step) for step in steps if FAMILY.why_not_step(step) is None]
    assert [parts.kept for parts in covered] == [parts.pool.name for parts in covered]
    assert len(covered) == len(BLOCKS)


REFUSED = {
    "no pool": (
        lambda b: b.conv(b.x(2, 8, 8, 8), b.w(8, 8, 1, 1)),
        "does not start with avg_pool2d",
    ),
    "a sum": (
        lambda b: b("add", b("relu", Pool()(b)), b.w(1)),
        "only a bias and functions may follow",
    ),
    "an early value": (lambda b: (y := Pool()(b), b("relu", y)), "read outside of it"),
    "odd channels": (Pool(channels=12), "8 at once, 12 to 128 do not divide"),
    "odd outputs": (Pool(outputs=12), "8 at once, 64 to 12 do not divide"),
    "a large window": (Pool(image=(9, 9), kernel=(9, 8)), "a window of 9x8 is too much code"),
    "no image": (Pool(n=0), "counted in 30 bits, got 0"),
    "a weight": (of_a_weight, "is constant, not an image that each call brings"),
}


class TestContract(Contract):
    family, steps, refused = FAMILY, VARIANTS, REFUSED
    dtypes = ("float16", "bfloat16")
    without_config = frozenset(name for name, pool in VARIANTS.items() if pool.outputs <= 32)
    builds, config = ("block 3",), Attrs(tile_m=32, tile_n=256)
    configs = (
        (Pool(), CONFIG, "not float32", "float32"),
        (Pool(), CONFIG, "have no bfloat16", "bfloat16", "sm70"),
        (Pool(), Attrs(CONFIG, tile_n=256), "without any of the 128 channels"),
        (Pool(outputs=256), Attrs(tile_m=64, tile_n=256), "too few registers"),
        (Pool(channels=1024), Attrs(CONFIG, tile_m=64), "shared memory", "float16", "sm75"),
    )

    def kernels(self, step, config):
        return {"run"}


def test_each_arch_has_configs_for_each_variant(step_of, cuda_arch):
    space = load_search_space(cuda_arch.name)
    for name, pool in VARIANTS.items():
        legal = candidates(step_of(pool, "float16"), space, ["pool_conv"])
        assert bool(legal) == (pool.outputs > 32), name


@pytest.mark.parametrize("channels", [8, 16, 24, 32, 48, 56, 64, 72, 128])
def test_pooled_pixels_are_spread_over_the_banks(step_of, channels):
    """Two rows of 64 bytes, as a quarter of a warp reads them at once, touch all 32 banks."""
    parts = FAMILY.parts(step_of(Pool(channels=channels), "float16"))
    pitch_bytes = parts.shared_bytes(CONFIG) // 16
    assert pitch_bytes >= 2 * channels
    assert {row * pitch_bytes % 128 for row in range(2)} == {0, 64}


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 7, 128, 129])
@pytest.mark.parametrize("name", BLOCKS)
def test_every_batch(step_of, assert_legal_configs_right, name, n):
    assert_legal_configs_right(FAMILY, step_of(replace(BLOCKS[name], n=n), "float16"))
