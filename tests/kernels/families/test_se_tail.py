"""Squeeze-and-excite in one kernel: which steps it reads, what it takes, that it is right."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from plantune.base.canonical import Attrs
from plantune.graph.fusions import fusions_named
from plantune.graph.partition import alternatives
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.kernels.families.se_tail import FAMILY
from plantune.kernels.registry import candidates, family_named
from plantune.models.se_resnet9 import SEResNet9Fixup
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

from .conftest import BLOCKS
from .contract import Contract

CONFIG = Attrs(images=1, threads=256, math="simt")


@dataclass(frozen=True)
class Tail:
    """The sizes of a tail and which of its parts are there."""

    n: int = 2
    channels: int = 64
    height: int = 4
    width: int = 4
    hidden: int = 4
    biases: bool = True
    by_rows: bool = True
    keepdim: bool = False
    gated: bool = True
    residual: str = "after"
    relu: bool = True
    offset: bool = True
    apart: bool = False
    pool: dict[str, tuple[int, int]] | None = None
    saved: bool = False
    unshifted: bool = False
    head: tuple[str, ...] = ()

    def layer(self, b, x, rows, columns):
        shape = (rows, columns) if self.by_rows else (columns, rows)
        y = b("matmul", x, b.w(*shape), transpose_a=False, transpose_b=self.by_rows)
        return b("add_channel", y, b.w(rows), axis=1) if self.biases else y

    def __call__(self, b):
        shape = (self.n, self.channels, self.height, self.width)
        x = b.x(*shape)
        for op in self.head:
            x = b(op, x, b.w(1))
        mean = squeezed = b("mean", x, dims=(2, 3), keepdim=self.keepdim)
        if self.keepdim:
            squeezed = b("reshape", mean, shape=(self.n, self.channels))
        hidden = b("relu", self.layer(b, squeezed, self.hidden, self.channels))
        gate = b("sigmoid", self.layer(b, hidden, self.channels, self.hidden))
        saved = (mean, hidden, gate) if self.saved else ()
        if not self.gated:
            return (*saved, gate)
        image_gate = b("reshape", gate, shape=(self.n, self.channels, 1, 1))
        y = b("mul", x, image_gate)
        if self.residual:
            other = b.x(*shape)
            y = b("add", *((y, other) if self.residual == "after" else (other, y)))
        if self.relu:
            y = b("relu", y)
        outputs = [*saved, *([image_gate] if self.saved else ()), *([y] if self.unshifted else ())]
        if self.apart:
            y = b.apart(y)
        elif self.offset:
            y = b("add", y, b.w(1))
        pooled = () if self.pool is None else (b("avg_pool2d", y, **self.pool, count_padding=True),)
        return (*outputs, y, *pooled)


@dataclass(frozen=True)
class Mobile:
    """As other people's networks have it: 1x1 convolutions on one pixel, other functions."""

    functions: tuple[str, str] = ("silu", "sigmoid")
    shape: tuple[int, ...] = (2, 48, 7, 5)
    hidden: int = 10
    gated: bool = True
    last: str = ""

    def __call__(self, b):
        c, x = self.shape[1], b.x(*self.shape)
        y = b("mean", x, dims=(2, 3), keepdim=True)
        widths = ((self.hidden, c), (c, self.hidden))
        for function, (width, depth) in zip(self.functions, widths, strict=True):
            y = b("add_channel", b.conv(y, b.w(width, depth, 1, 1)), b.w(width), axis=1)
            y = b(function, y)
        y = b("mul", x, y) if self.gated else y
        return b(self.last, y) if self.last else y


MOBILE = {
    "EfficientNet": Mobile(),
    "MobileNetV3": Mobile(("relu", "hardsigmoid"), (3, 72, 14, 14), 24, last="hardswish"),
    "RegNet": Mobile(("relu", "sigmoid"), (2, 104, 8, 8), 12),
    "gates alone": Mobile(gated=False),
    "wide": Mobile(shape=(2, 1152, 7, 7), hidden=48),
}


@pytest.mark.parametrize("name", MOBILE)
def test_it_reads_convolutions_of_one_pixel_and_any_function(step_of, name):
    step = step_of(MOBILE[name], "float16")
    assert FAMILY.parts(step).tail.functions == MOBILE[name].functions
    assert candidates(step, load_search_space("sm90"), [FAMILY.name])


def test_kernels_of_two_functions_refuse_others(step_of):
    """All the same they read the convolutions."""
    others, usual = (step_of(Mobile(f)) for f in (("silu", "sigmoid"), ("relu", "sigmoid")))
    family = family_named("squeeze_excite")
    assert "followed by silu, not by relu" in family.why_not_step(others)
    assert family.why_not_step(usual) is None


def test_it_builds_for_other_functions(step_of, build_within_limits):
    step = step_of(MOBILE["MobileNetV3"], "float16")
    for config in (CONFIG, Attrs(CONFIG, images=2, math="mma")):
        build_within_limits(FAMILY, step, config, load_arch("sm90"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", MOBILE)
def test_other_peoples_layers_are_right_on_a_gpu(step_of, assert_right, gpu_space, name):
    step = step_of(MOBILE[name], "float16")
    first, *_, last = candidates(step, gpu_space, [FAMILY.name])
    for candidate in (first, last):
        assert_right(step, candidate, gpu_space)


def block(channels, size, n=2, **parts):
    return Tail(n, channels, size, size, max(channels // 16, 1), **parts)


def window(kernel, stride, padding):
    return {"kernel": (kernel,) * 2, "stride": (stride,) * 2, "padding": (padding,) * 2}


VARIANTS = {
    "all parts": Tail(),
    "pooled": Tail(3, pool=window(3, 2, 1)),
    "pooled, odd": Tail(3, 24, 5, 7, 5, pool=window(2, 2, 0)),
    "pooled, of one pixel": Tail(3, 24, 5, 7, 5, pool=window(3, 1, 1), offset=False),
    "no biases": Tail(biases=False),
    "weights by columns": Tail(by_rows=False),
    "mean keeps its axes": Tail(keepdim=True),
    "gates only": Tail(gated=False),
    "no residual": Tail(residual=""),
    "residual before": Tail(residual="before"),
    "no relu": Tail(relu=False),
    "no offset": Tail(offset=False),
    "product only": Tail(residual="", relu=False, offset=False),
    "two outputs": Tail(unshifted=True),
    "all that training reads": Tail(saved=True, unshifted=True, keepdim=True),
    "gates and what they come from": Tail(saved=True, gated=False),
    "scaled and shifted before": Tail(saved=True, head=("mul", "add")),
    "scaled before": Tail(residual="", head=("mul",)),
    "shifted before": Tail(3, 24, 5, 7, 5, head=("add",)),
    "a scaled image read twice": Tail(2, 256, 30, 31, 16, head=("mul", "add")),
    "odd image": Tail(3, 24, 5, 7, 5),
    "one pixel": Tail(3, 32, 1, 2, 2),
    "few channels": Tail(5, 8, 9, 9, 1),
    "hidden of whole vectors": Tail(2, 128, 3, 3, 32),
    "wide hidden layer": Tail(2, 512, 2, 2, 256),
    "an image read twice": Tail(2, 256, 30, 31, 16),
    **{f"block {c}": block(c, size, n=3) for c, size in BLOCKS},
}
# A value apart is of 16 bits.
TRAINED = {
    f"block {c}": block(
        c, size, n=5, saved=True, head=("mul", "add"), apart=True, pool=window(3, 2, 1)
    )
    for c, size in BLOCKS[:3]
}


BATCHES = {
    f"{channels}-{n}": block(channels, size, n)
    for channels, size in BLOCKS
    for n in (1, 3, 128, 129)
}


def test_the_network_offers_a_tail_for_each_block():
    graph = extract(SEResNet9Fixup().eval(), TensorType((2, 3, 64, 64)))
    steps = alternatives(graph, fusions_named("se_tail"))
    ends = {step.ops[-1] for step in steps if FAMILY.why_not_step(step) is None}
    assert ends == {"sigmoid", "reshape", "mul", "add", "relu"}


def pool_beside(b):
    (y,) = Tail()(b)
    return y, b("avg_pool2d", b.graph.inputs[0][0], **window(3, 2, 1), count_padding=True)


def with_a_product(b):
    mean = b("mean", b.x(2, 64, 4, 4), dims=(2, 3), keepdim=False)
    linear = Tail().layer(b, mean, 4, 64)
    gate = b("sigmoid", Tail().layer(b, b("relu", linear), 64, 4))
    return linear, gate


REFUSED = {
    "another start": (lambda b: b("relu", b.x(2, 64, 4, 4)), "followed by relu, not by mean"),
    "no end": (lambda b: b("mean", b.x(2, 8, 4, 4), dims=(2, 3), keepdim=False), "not by matmul"),
    "a pool of something else": (pool_beside, "is pooled, which is not the result"),
    "a pool without its sum": (
        lambda b: Tail(pool=window(3, 2, 1))(b)[-1],
        "is pooled, which is not the result",
    ),
    "a pool that counts pixels": (
        lambda b: (y := Tail()(b)[-1], b("avg_pool2d", y, **window(3, 2, 1), count_padding=False)),
        "count other pixels at the border",
    ),
    "a head that is not a number": (
        lambda b: Tail(biases=False).layer(b, pooled(b, b.w(64, 1, 1)), 4, 64),
        "with one constant value",
    ),
    "a head that calls bring": (
        lambda b: Tail(biases=False).layer(b, pooled(b, b.x(1)), 4, 64),
        "with one constant value",
    ),
    "a mean of channels": (
        lambda b: b("mean", b.x(2, 64, 4, 4), dims=(1, 2), keepdim=False),
        "is not the mean of an image's pixels",
    ),
    "odd channels": (Tail(channels=20), "channels are read by eights"),
    "no activation": (
        lambda b: Tail(biases=False).layer(b, pooled(b), 4, 64),
        "is followed by nothing, not by a function",
    ),
    "a value that stays inside": (with_a_product, "stays inside, but is read outside"),
    "another dtype": (Tail(), "got float64", "float64"),
    "a product that is read outside": (
        lambda b: (y := Tail(residual="", relu=False, offset=False)(b)[-1], b("relu", y)),
        "stays inside, but is read outside",
    ),
}


def pooled(b, *factors):
    x = b.x(2, 64, 4, 4)
    for factor in factors:
        x = b("mul", x, factor)
    return b("mean", x, dims=(2, 3), keepdim=False)


class TestContract(Contract):
    family, steps, refused, config = FAMILY, VARIANTS, REFUSED, CONFIG
    builds = ("block 64",)
    configs = (
        (
            Tail(n=4, channels=512),
            Attrs(CONFIG, images=4, threads=128),
            "32 threads of an image do not cover",
        ),
        (Tail(n=2), Attrs(CONFIG, images=4), "4 images is larger than the batch"),
        (Tail(4, 2048, 4, 4), Attrs(CONFIG, images=4, threads=1024), "bytes of shared memory"),
        (Tail(), Attrs(CONFIG, math="mma"), "columns for 2 to 4 images, got 1"),
    )

    def check_usage(self, step, config, usage):
        super().check_usage(step, config, usage)
        most = FAMILY.parts(step).shared_bytes_at_most(config)
        assert all(used.shared_bytes <= most for used in usage.values())


class TestTrained(Contract):
    family, steps, dtypes = FAMILY, TRAINED, ("float16", "bfloat16")


class TestBatches(Contract):
    family, steps, dtypes = FAMILY, BATCHES, ("float16",)


@pytest.mark.parametrize(("channels", "size"), BLOCKS)
def test_each_arch_has_a_config_for_each_block(step_of, cuda_arch, channels, size):
    step = step_of(block(channels, size, n=128), "float16")
    assert len(candidates(step, load_search_space(cuda_arch.name), ["se_tail"])) >= 4


UNEVEN = ["odd image", "few channels", "wide hidden layer"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", UNEVEN)
def test_shared_memory_is_known_before_the_build(step_of, dtype, name):
    """Each variant meets both configs, and so does each dtype."""
    step, number = step_of(VARIANTS[name], dtype), UNEVEN.index(name) + (dtype == "float32")
    config = (CONFIG, Attrs(images=2, threads=512, math="simt"))[number % 2]
    usage = FAMILY.build(FAMILY.parts(step), config, load_arch("sm80")).usage
    assert usage["run"].shared_bytes <= FAMILY.parts(step).shared_bytes_at_most(config)
