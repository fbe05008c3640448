"""Gradients of images whose weights stay in shared memory: what they refuse, build and run."""

from __future__ import annotations

from typing import ClassVar

import pytest

from plantune.base.canonical import Attrs
from plantune.kernels.families.resident_dgrad import FAMILY
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

ARCH, SPACE = load_arch("sm90"), load_search_space("sm90")

# With stages.
RESIDENT = {
    "layer": (Gradient(5, 64, (16, 16), 64), 2),
    "second": (Gradient(129, 64, (16, 16), 64, parts=SECOND), 2),
    "second, two tiles": (Gradient(40, 128, (8, 8), 128, parts=SECOND), 1),
    "apart": (Gradient(7, 64, (16, 16), 64, parts=APART), 2),
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
    "apart": (Gradient(270, 64, (16, 16), 64, parts=APART), 2),
    "strided, apart": (Gradient(540, 64, (16, 16), 128, stride=2, parts=POOLED_APART), 2),
    "strided, odd": (Gradient(270, 64, (15, 17), 72, stride=2, parts=SECOND), 2),
    "strided, other channels": (Gradient(270, 72, (9, 22), 40, stride=2, parts=("pool",)), 1),
    "strided, no padding": (Gradient(270, 64, (10, 17), 64, stride=2, padding=0), 2),
    "strided, much padding": (
        Gradient(540, 64, (14, 14), 64, stride=2, padding=2, parts=("relu_grad", "channels")),
        1,
    ),
}


def config(stages, threads=256):
    return Attrs(stages=stages, threads=threads)


RUN = {
    **{name: (emit, config(stages)) for name, (emit, stages) in RESIDENT.items()},
    **{f"staged, {name}": (emit, config(stages)) for name, (emit, stages) in STAGED.items()},
    **{
        f"{name}, three groups": (RESIDENT[name][0], config(1, 384))
        for name in ("earliest", "both", "second")
    },
    "staged, second, three groups": (STAGED["second"][0], config(2, 384)),
}


def built(parts):
    stride = 2 if parts == POOLED else 1
    return Gradient(128, 64, (16, 16), 64 * stride, stride=stride, parts=parts), config(2)


class TestContract(Contract):
    """Weights stay where they serve many pixels."""

    family, chosen = FAMILY, RUN
    dtypes = ("float16", "bfloat16")
    refused: ClassVar = {
        "far steps": (Gradient(stride=3), "with stride 1 or 2, got (3, 3)"),
        "many taps": (Gradient(kernel=5, stride=2, padding=2), "has more than 2x2 taps"),
        "1x1": (Gradient(kernel=1), "of a larger kernel"),
    }
    configs = (
        (
            Gradient(o=128, stride=2),
            config(1),
            "phases read all 128 channels, 1 stages hold less",
        ),
        (Gradient(o=256), config(1), "bytes of shared memory, a block has"),
    )
    builds_chosen = (
        built(SECOND),
        built(EARLIEST),
        built(("add", "relu_grad", "channels")),
        built(POOLED),
        *(RUN[f"staged, {name}"] for name in ("earliest", "strided", "strided, apart")),
    )

    def kernels(self, step, config):
        return {"run", "add"}


@pytest.mark.parametrize("name", STAGED)
def test_what_many_tiles_read_and_write_is_staged(step_of, name):
    emit, stages = STAGED[name]
    design = FAMILY.design(FAMILY.parts(step_of(emit, "float16")), config(stages))
    assert design.staged > 0
    assert design.kernel[1].endswith("Staged")


@pytest.mark.parametrize(
    ("emit", "stages"),
    [
        (Gradient(129, 64, (16, 16), 64, parts=SECOND), 2),  # few tiles
        (Gradient(270, 64, (16, 16), 64, parts=EARLIEST), 3),  # no room
        (Gradient(540, 64, (16, 16), 128, stride=2, parts=FIRST), 2),  # a residual of phases
    ],
)
def test_what_else_is_read_and_written_by_threads(step_of, emit, stages):
    parts = FAMILY.parts(step_of(emit, "float16"))
    design = FAMILY.design(parts, config(stages))
    assert design.staged == 0


@pytest.mark.parametrize(("images", "measured_us"), [(2048, 72.8), (8192, 264.6)])
def test_phases_take_products_and_copies_one_after_the_other(step_of, images, measured_us):
    """Of se_resnet9's first pooled gradient, on an H200 (2026-11-23)."""
    emit = Gradient(images, 64, (16, 16), 128, stride=2, parts=POOLED_APART)
    parts = FAMILY.parts(step_of(emit, "float16"))
    guess_us = FAMILY.estimate_us(parts, Attrs(stages=2, threads=256), ARCH)
    assert measured_us / 1.3 < guess_us < 1.3 * measured_us
