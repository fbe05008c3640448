"""Gradients of layer norms: which steps, which configs, that they are right."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plantune.base.canonical import Attrs
from plantune.kernels.families.layer_norm_grad import BLOCKS, FAMILY

from .norms import (
    GradientContract,
    assert_a_pass_has_the_gradients_of_float64,
    assert_guessed_for_training,
    gradient_of,
)


def grad(shape, axes=1, affine=2, left=(0, 1, 2)):
    def statistics(b):
        return b.statistics(*shape[:-axes], *(1,) * axes)

    return gradient_of("layer_norm", shape, statistics, shape[-axes:], affine, left, axes=axes)


STEPS = {
    "rows": grad((5, 96)),
    "more rows than blocks at once": grad((2 * BLOCKS * 64 + 3, 24)),
    "images": grad((2, 3, 5, 192)),
    "odd": grad((7, 37)),
    "no weights": grad((3, 4, 64), affine=0),
    "no bias": grad((3, 200), affine=1),
    "one element": grad((6, 1)),
    "one row": grad((1, 768)),
    "two axes": grad((3, 6, 20), axes=2),
    "wide": grad((2, 4096)),
    "weights alone": grad((40, 48), left=(1, 2)),
    "x alone": grad((40, 48), left=(0,)),
}
CONFIG = Attrs(lanes=32, threads=128)


REFUSED = {
    "another op": (lambda b: b("relu", b.x(2, 8)), "only a layer norm's gradient"),
    "nothing": (grad((0, 8)), "nothing to normalise"),
    "far too wide": (grad((2, 1 << 13)), "too wide for a block's sums"),
    "another dtype": (STEPS["rows"], "got float64", "float64"),
}


class TestContract(GradientContract):
    family, steps, refused = FAMILY, STEPS, REFUSED
    builds = ("odd", "wide", "no weights")
    configs = (
        (grad((3, 2048)), CONFIG, "would hold 64"),
        (grad((3, 2048)), Attrs(lanes=256, threads=128), "has no 256"),
        (grad((3, 2048)), Attrs(lanes=64, threads=128), None),
    )


def test_blocks_are_few_and_leave_sums(step_of):
    few = FAMILY.parts(step_of(grad((5, 96)), "float16"))
    assert few.blocks(CONFIG) == 2
    assert FAMILY.workspace_bytes(few, CONFIG) == 2 * 2 * 96 * 4
    many = FAMILY.parts(step_of(grad((100_000, 96)), "float16"))
    assert many.blocks(CONFIG) == BLOCKS
    none = FAMILY.parts(step_of(grad((100_000, 96), affine=0), "float16"))
    assert FAMILY.workspace_bytes(none, CONFIG) == 0


def test_a_guess_for_training_takes_it():
    layers = nn.Linear(64, 96), nn.LayerNorm(96), nn.GELU()
    assert_guessed_for_training(FAMILY, layers, (512, 64))


@pytest.mark.gpu
def test_a_pass_has_the_gradients_of_float64():
    torch.manual_seed(0)
    layers = nn.Linear(64, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 8)
    module = nn.Sequential(*layers).cuda().half()
    x = torch.randn(700, 64, device="cuda").half()
    seed = torch.randn(700, 8, device="cuda").half()
    assert_a_pass_has_the_gradients_of_float64(module, x, seed)
