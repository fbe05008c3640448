"""Chains that end with a sum: what they refuse, how rows are shared, that they build and run."""

from __future__ import annotations

import pytest

from plantune.base.canonical import Attrs
from plantune.kernels.families.pointwise_sum import FAMILY
from plantune.kernels.family import Candidate
from plantune.kernels.registry import why_not
from plantune.space.search_space import load_search_space

SPACE = load_search_space("sm90")


def config(threads=256, vectors=2, blocks=264):
    return Attrs(threads=threads, vectors=vectors, blocks=blocks)


def total(b, value):
    return b("sum_to", value, shape=(1,))


def masked(*shape, leaves):
    """The sum of a ReLU's gradient, which leaves, too, or not."""

    def emit(b):
        dy = b("relu_grad", b.x(*shape), b.x(*shape))
        return (dy, total(b, dy)) if leaves else total(b, dy)

    return emit


def gates(b):
    """The gradients of an image and of its gates."""
    shape = (5, 64, 4, 4)
    dy = b("relu_grad", b.x(*shape), b.x(*shape))
    return dy, b("sum_to", b("mul", dy, b.x(*shape)), shape=(5, 64, 1, 1))


def scaled(b):
    """What squeeze-and-excite hands back, with the gradients of a bias and a scale."""
    shape, gate = (7, 32, 6, 5), (7, 32, 1, 1)
    spread = b("broadcast_to", b.x(*gate), shape=shape)
    whole = b("add", b("mul", b.x(*shape), b.x(*gate)), spread)
    return whole, total(b, b("mul", whole, b("mul", b.x(*shape), b.w(1))))


CHANNELS = {"dims": (0, 2, 3), "keepdim": False}
RUN = {
    "all": lambda b: total(b, b.x(3, 64, 16, 16)),
    "all of a matrix": lambda b: b("sum_to", b.x(33, 24), shape=()),
    "one row": lambda b: total(b, b.x(1, 8)),
    "channels": lambda b: b("sum", b.x(9, 72, 7, 5), **CHANNELS),
    "channels, kept": lambda b: b("sum_to", b.x(9, 64, 7, 5), shape=(64, 1, 1)),
    "columns": lambda b: b("sum", b.x(129, 512), dims=(0,), keepdim=False),
    "one column of vectors": lambda b: b("sum", b.x(300, 8), dims=(0,), keepdim=True),
    "images": lambda b: b("sum", b.x(5, 64, 7, 9), dims=(2, 3), keepdim=False),
    "mean": lambda b: b("mean", b("relu", b.x(5, 64, 7, 9)), dims=(2, 3), keepdim=True),
    "masked": masked(7, 64, 16, 16, leaves=False),
    "masked, and leaves": masked(7, 64, 16, 16, leaves=True),
    "many images": masked(129, 128, 8, 8, leaves=True),
    "gates": gates,
    "scaled": scaled,
}


@pytest.mark.parametrize(
    ("emit", "dtype", "reason"),
    [
        (lambda b: b("relu", b.x(2, 8, 4, 4)), "float16", "ends with relu, not with a sum"),
        (lambda b: total(b, b.x(2, 12, 4, 4)), "float16", "are not whole vectors"),
        (lambda b: total(b, b.x(2, 8, 4)), "float16", "only images and matrices"),
        (lambda b: total(b, b.x(2, 8, 4, 4)), "float64", "float64"),
        (
            lambda b: b("sum", b.x(4, 8), dims=(1,), keepdim=False),
            "float16",
            "not that of all, of channels",
        ),
        (
            lambda b: b("sum", b.x(4, 8, 2, 2), dims=(0,), keepdim=False),
            "float16",
            "not that of all, of channels",
        ),
        (
            lambda b: total(
                b, b("matmul", b.x(8, 8), b.w(8, 8), transpose_a=False, transpose_b=True)
            ),
            "float16",
            "does not work place by place",
        ),
        (
            lambda b: b("sum", b("relu", b.x(8)), dims=(0,), keepdim=False),
            "float16",
            "only images and matrices",
        ),
    ],
)
def test_it_says_which_steps_it_does_not_run(step_of, emit, dtype, reason):
    assert reason in why_not(step_of(emit, dtype), Candidate("pointwise_sum", config()), SPACE)


def test_more_channels_than_threads(step_of):
    step = step_of(lambda b: total(b, b.x(2, 4096)), "float16")
    assert "at once" in why_not(step, Candidate("pointwise_sum", config()), SPACE)
    assert why_not(step, Candidate("pointwise_sum", config(512)), SPACE) is None


@pytest.mark.parametrize(
    ("name", "blocks", "rows"),
    [
        ("all", 24, 32),  # 32 rows of 64 channels are what 256 threads read at once
        ("many images", 258, 32),
        ("images", 5, 63),
        ("one row", 1, 256),
    ],
)
def test_blocks_have_rows_for_all_threads(step_of, name, blocks, rows):
    parts = FAMILY.parts(step_of(RUN[name], "float16"))
    assert (parts.blocks(config()), parts.rows_of_block(config())) == (blocks, rows)


def test_few_blocks_are_expected_to_be_slow_on_large_images(step_of):
    """They leave multiprocessors idle, or wait for one read after the other."""
    parts = FAMILY.parts(step_of(lambda b: total(b, b.x(2048, 64, 16, 16)), "float16"))
    few, many = (
        FAMILY.estimate_us(parts, Attrs(config(), blocks=blocks), SPACE.arch)
        for blocks in (64, 1056)
    )
    assert few > 2 * many


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("masked, and leaves", "float16"),
        ("masked, and leaves", "float32"),
        ("gates", "bfloat16"),
        ("scaled", "float32"),
        ("columns", "float16"),
    ],
)
def test_it_builds_without_spilling(step_of, build_within_limits, name, dtype):
    for vectors in (1, 4):
        step = step_of(RUN[name], dtype)
        build_within_limits(FAMILY, step, config(vectors=vectors), SPACE.arch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", RUN)
def test_it_is_right(step_of, assert_legal_configs_right, name, dtype):
    chosen = [config(vectors=1), config(512, vectors=4, blocks=64), config(blocks=1056)]
    assert_legal_configs_right(FAMILY, step_of(RUN[name], dtype), chosen)
