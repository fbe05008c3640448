"""Chains that end with a sum: what they refuse, how rows are shared, that they build and run."""

from __future__ import annotations

import pytest

from plantune.base.canonical import Attrs
from plantune.kernels.families.pointwise_sum import FAMILY
from plantune.space.search_space import load_search_space

from .contract import Contract

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


def sum_of(*shape, dims):
    return lambda b: b("sum", b.x(*shape), dims=dims, keepdim=False)


def product(b):
    return b("matmul", b.x(8, 8), b.w(8, 8), transpose_a=False, transpose_b=True)


OTHER_SUM, OTHER_VALUES = "not that of all, of channels", "only images and matrices"
REFUSED = {
    "no sum": (lambda b: b("relu", b.x(2, 8, 4, 4)), "ends with relu, not with a sum"),
    "odd channels": (lambda b: total(b, b.x(2, 12, 4, 4)), "are not whole vectors"),
    "three axes": (lambda b: total(b, b.x(2, 8, 4)), OTHER_VALUES),
    "float64": (lambda b: total(b, b.x(2, 8, 4, 4)), "float64", "float64"),
    "rows": (sum_of(4, 8, dims=(1,)), OTHER_SUM),
    "all images": (sum_of(4, 8, 2, 2, dims=(0,)), OTHER_SUM),
    "a product": (lambda b: total(b, product(b)), "does not work place by place"),
    "a vector": (sum_of(8, dims=(0,)), OTHER_VALUES),
}
BUILT = (
    ("masked, and leaves", "float16"),
    ("masked, and leaves", "float32"),
    ("gates", "bfloat16"),
    ("scaled", "float32"),
    ("columns", "float16"),
)


class TestContract(Contract):
    family, steps, refused = FAMILY, RUN, REFUSED
    configs = (
        (lambda b: total(b, b.x(2, 4096)), config(), "at once"),
        (lambda b: total(b, b.x(2, 4096)), config(512), None),
    )
    builds_chosen = tuple(
        (RUN[name], config(vectors=vectors), dtype) for name, dtype in BUILT for vectors in (1, 4)
    )

    def kernels(self, step, config):
        return {"run", "run_unaligned", "add"}

    @pytest.mark.gpu
    def test_it_is_right(self, assert_legal_configs_right, case, dtype):
        chosen = [config(vectors=1), config(512, vectors=4, blocks=64), config(blocks=1056)]
        assert_legal_configs_right(FAMILY, self.step(RUN[case], dtype), chosen)
