"""Linear layers as dot products of warps: which steps, which configs, that they are right."""

from __future__ import annotations

import pytest

from plantune.base.canonical import Attrs
from plantune.kernels.families.linear import FAMILY
from plantune.space.arch import load_arch

from .contract import Contract


def layer(m, n, depth, bias=True, activation="", weight=True):
    def emit(b):
        other = b.w(n, depth) if weight else b.x(n, depth)
        y = b("matmul", b.x(m, depth), other, transpose_a=False, transpose_b=True)
        y = b("add_channel", y, b.w(n), axis=1) if bias else y
        return b(activation, y) if activation else y

    return emit


LAYERS = {
    "plain": layer(5, 9, 7, bias=False),
    "bias": layer(5, 9, 7),
    "relu": layer(3, 8, 64, activation="relu"),
    "sigmoid": layer(128, 64, 4, activation="sigmoid"),
    "one element": layer(1, 1, 1),
    "one row": layer(1, 33, 1280),
    "odd inner axis": layer(2, 100, 257),
    "many rows": layer(129, 40, 512, activation="relu"),
    "two inputs": layer(4, 6, 24, bias=False, weight=False),
}


def product(b, a=(5, 7), w=(9, 7), ta=False, tb=True):
    return b("matmul", b.x(*a), b.w(*w), transpose_a=ta, transpose_b=tb)


REFUSED = {
    "another op": (lambda b: b("relu", b.x(2, 3)), "only a matrix product"),
    "no bias before relu": (lambda b: b("relu", product(b)), "only a matrix product"),
    "another activation": (
        lambda b: b("affine", LAYERS["bias"](b), alpha=2.0, beta=0.0),
        "affine is none of relu, sigmoid",
    ),
    "a^T": (lambda b: product(b, (7, 5), ta=True), "must be contiguous along the inner axis"),
    "no b^T": (lambda b: product(b, w=(7, 9), tb=False), "must be contiguous along the inner axis"),
    "bias per row": (
        lambda b: b("add_channel", product(b), b.w(5), axis=0),
        "not one per column",
    ),
    "a product read outside": (
        lambda b: (y := product(b), b("add_channel", y, b.w(9), axis=1)),
        "is read outside of it",
    ),
    "many rows": (layer(4096, 8, 8), "2048 rows at most, got 4096"),
    "no rows": (layer(0, 8, 8), "nothing to multiply"),
    "another dtype": (LAYERS["bias"], "got float64", "float64"),
}


class TestContract(Contract):
    family, steps, refused = FAMILY, LAYERS, REFUSED
    builds = ("many rows",)
    configs = (
        (layer(3, 8, 8), Attrs(rows=1, tile_n=8), None),
        (layer(3, 8, 8), Attrs(rows=4, tile_n=8), None),
        (layer(3, 8, 8), Attrs(rows=8, tile_n=8), "half of 8 rows hold the 3 that are there"),
    )

    def configs_to_build(self, step, arch):
        return Attrs(rows=2, tile_n=32), Attrs(rows=8, tile_n=32)


# By rows, columns and depth, then by the rows and columns of a warp: what replayed launches
# took on an H200, in us (2026-11-22).
MEASURED = {
    (16, 1000, 512): {(1, 1): 4.1, (1, 4): 3.3, (2, 1): 2.9, (2, 4): 4.0, (4, 4): 4.7, (8, 4): 5.8},
    (64, 1000, 512): {
        (1, 1): 12.3,
        (1, 4): 8.6,
        (2, 4): 7.0,
        (4, 4): 7.7,
        (8, 1): 7.9,
        (8, 4): 6.9,
    },
    (32, 1000, 2048): {(1, 1): 18.6, (1, 4): 15.7, (2, 4): 12.9, (4, 4): 8.3, (8, 4): 9.2},
}


@pytest.mark.parametrize("shape", MEASURED)
def test_the_guess_finds_a_fast_config(step_of, shape):
    parts, measured = FAMILY.parts(step_of(layer(*shape), "float16")), MEASURED[shape]

    def guess(tile):
        return FAMILY.estimate_us(parts, Attrs(rows=tile[0], tile_n=8 * tile[1]), load_arch("sm90"))

    assert measured[min(measured, key=guess)] <= 1.05 * min(measured.values())
