"""Residual blocks of two convolutions in one kernel: what they are, that they build and run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from plantune.base.canonical import Attrs
from plantune.graph.fusions import fusions_named
from plantune.graph.partition import alternatives
from plantune.kernels.families.conv_pair import FAMILY
from plantune.kernels.registry import candidates, estimate_us
from plantune.plans.guess import guessed_plan
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

from .contract import Contract

SPACE = load_search_space("sm90")
CONFIG = Attrs(rows=4, columns=8, threads=128, blocks_per_sm=2)


@dataclass(frozen=True)
class Block:
    """That of "IMPALA"; other sizes and parts where a test says so."""

    n: int = 2
    channels: int = 16
    between: int = 16
    size: tuple[int, int] = (9, 13)
    before: str | None = "relu"
    norms: bool = False
    bias: bool = True
    inner: str = "relu"
    last: tuple[str, ...] = ()
    padding: tuple[int, int] = (1, 1)
    added: str = "x"

    def __call__(self, b):
        x = b.x(self.n, self.channels, *self.size)
        other = b.x(self.n, self.channels, *self.size) if self.added == "another" else x
        y = b(self.before, x) if self.before else x
        added = {"x": x, "another": other, "its relu": y}[self.added]
        y = b(self.inner, self._layer(b, y, self.channels, self.between))
        y = b("add", added, self._layer(b, y, self.between, self.channels))
        for function in self.last:
            y = b(function, y)
        return y

    def _layer(self, b, x, inputs, outputs):
        y = b.conv(x, b.w(outputs, inputs, 3, 3), padding=self.padding)
        if self.norms:
            y = b("mul_channel", y, b.w(outputs), axis=1)
        return b("add_channel", y, b.w(outputs), axis=1) if self.bias else y


IMPALA = Block()
RESNET = Block(before=None, norms=True, last=("relu",))
STEPS = {
    "impala": IMPALA,
    "resnet": RESNET,
    "32 channels": replace(IMPALA, channels=32, between=32, size=(8, 8)),
    "wider between": replace(RESNET, channels=8, between=24, size=(11, 5)),
    "narrower between": replace(IMPALA, channels=32, between=16, size=(6, 17)),
    "24 channels": replace(RESNET, channels=24, between=24, size=(8, 8)),
    "no bias": replace(IMPALA, bias=False),
    "other functions": replace(RESNET, inner="silu", last=("hardswish",)),
    "few pixels": replace(IMPALA, n=3, size=(3, 5)),
    "a few rows": replace(IMPALA, size=(3, 40)),
    "wide": replace(IMPALA, n=1, size=(33, 35)),
    "many": replace(RESNET, n=37, size=(16, 16)),
}


def with_what_is_between(b):
    y = IMPALA(b)
    return b.graph.nodes[-2].name, y


REFUSED = {
    "a residual of something else": (replace(IMPALA, added="another"), "must be added"),
    "a residual after the relu": (replace(IMPALA, added="its relu"), "must be added"),
    "another function before": (replace(IMPALA, before="silu"), "only a ReLU may come before"),
    "no padding": (
        lambda b: b("relu", b.conv(b.conv(b.x(1, 8, 9, 9), b.w(8, 8, 3, 3)), b.w(8, 8, 3, 3))),
        "of 3x3 that keep the size",
    ),
    "12 channels": (replace(IMPALA, channels=12), "multiples of 8"),
    "40 channels": (replace(IMPALA, between=40), "up to 32"),
    "one convolution": (lambda b: b.conv(b.x(1, 8, 9, 9), b.w(8, 8, 3, 3)), "only two"),
    "float32": (IMPALA, "not float32", "float32"),
    "a value between leaves": (with_what_is_between, "read outside of it"),
    "no image": (replace(IMPALA, n=0), "nothing to compute"),
}


class TestContract(Contract):
    family, steps, refused, config = FAMILY, STEPS, REFUSED, CONFIG
    dtypes = ("float16", "bfloat16")
    builds = ("impala", "resnet", "wide")
    configs = (
        (IMPALA, Attrs(CONFIG, rows=32), "half of 32 rows hold all 9"),
        (IMPALA, Attrs(CONFIG, columns=32), "half of 32 columns hold all 13"),
        (IMPALA, Attrs(CONFIG, columns=4), "32 to 1024 pixels, not 16"),
        (IMPALA, Attrs(CONFIG, threads=512, blocks_per_sm=3), "leave a thread 42 registers"),
        (IMPALA, CONFIG, None),
    )

    @pytest.mark.gpu
    def test_it_is_right(self, assert_right, gpu_space, case, dtype):
        step = self.step(STEPS[case], dtype)
        found = candidates(step, gpu_space, [FAMILY.name])
        for candidate in found[:: max(len(found) // 2, 1)]:
            assert_right(step, candidate, gpu_space)


@pytest.mark.parametrize("block", [IMPALA, RESNET, replace(RESNET, bias=False)])
def test_a_partition_may_use_the_whole_block(graph_of, block):
    graph = graph_of(block, "float16")
    found = alternatives(graph, fusions_named("conv_pair"))
    assert any(len(step.nodes) == len(graph.nodes) for step in found)


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_without_a_search_the_whole_block_is_a_step(graph_of, arch):
    graph = graph_of(IMPALA, "float16")
    plan = guessed_plan(graph, load_search_space(arch), network="residual")
    assert [(c.candidate.family, len(c.nodes)) for c in plan.choices] == [("conv_pair", 7)]


def test_tiles_of_a_whole_row_have_no_margin_beside_it(step_of):
    parts = FAMILY.parts(step_of(replace(IMPALA, size=(16, 16)), "float16"))
    strip, whole = Attrs(CONFIG, rows=8, columns=16), Attrs(CONFIG, rows=16, columns=16)
    assert parts.made(strip) == (10, 16)
    assert parts.made(whole) == (16, 16)
    assert parts.shared_bytes(whole) == 16 * 2 * 18 * 18 * 3
    assert parts.blocks(strip) == 4


def test_blocks_that_share_a_multiprocessor_fit(step_of):
    step = step_of(replace(IMPALA, n=512, size=(32, 32)), "float16")
    legal = candidates(step, SPACE, [FAMILY.name])
    assert len(legal) > 20
    for candidate in legal:
        shared = FAMILY.parts(step).shared_bytes(candidate.config)
        most = SPACE.arch.gpu.shared_memory_per_block_bytes
        assert candidate.config["blocks_per_sm"] * shared <= most + 1024
        assert estimate_us(step, candidate, SPACE.arch) > 0


# Channels, size, and what replayed launches took on an H200, in us (2026-11-23).
MEASURED = {
    (16, 32): {(32, 32, 256, 2): 27.87, (16, 32, 256, 3): 36.30, (8, 32, 128, 3): 43.35},
    (32, 16): {(16, 16, 256, 2): 20.79, (16, 16, 128, 4): 22.76, (4, 16, 256, 3): 40.19},
    (32, 8): {(8, 8, 256, 4): 8.26, (8, 8, 256, 2): 9.82, (4, 8, 256, 2): 16.15},
}


@pytest.mark.parametrize("sizes", MEASURED)
def test_the_guess_is_near_what_was_measured(step_of, sizes):
    channels, size = sizes
    block = replace(IMPALA, n=512, channels=channels, between=channels, size=(size, size))
    parts = FAMILY.parts(step_of(block, "float16"))
    for config, us in MEASURED[sizes].items():
        named = dict(zip(("rows", "columns", "threads", "blocks_per_sm"), config, strict=True))
        assert 0.8 < FAMILY.estimate_us(parts, Attrs(named), SPACE.arch) / us < 1.25


@pytest.mark.parametrize("arch", ["sm70", "sm75"])
def test_it_needs_products_that_older_chips_do_not_have(arch):
    assert "no products" in FAMILY.why_not_arch(load_arch(arch))
