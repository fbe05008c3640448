"""Gradients of group norms: which steps, which configs, that they are right."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plantune.kernels.families.group_norm_grad import FAMILY

from .norms import (
    GradientContract,
    ImagesContract,
    assert_a_pass_has_the_gradients_of_float64,
    assert_guessed_for_training,
    gradient_of,
)
from .norms import grouped as config


def grad(shape, groups, affine=2, left=(0, 1, 2)):
    def statistics(b):
        return b.x(shape[0], groups)

    return gradient_of("group_norm", shape, statistics, shape[1:2], affine, left, groups=groups)


STEPS = {
    "images": grad((2, 64, 7, 8), 8),
    "odd channels": grad((3, 6, 5, 5), 2),
    "one group": grad((2, 24, 3, 3), 1),
    "no weights": grad((3, 16, 4, 5), 4, affine=0),
    "no bias": grad((2, 32, 6, 6), 4, affine=1),
    "a group of each channel": grad((2, 16, 4, 4), 16),
    "several groups in a vector": grad((2, 64, 9, 7), 32),
    "rows": grad((5, 48), 4),
    "pixels in a row": grad((2, 8, 40), 2),
    "one pixel": grad((4, 64, 1, 1), 4),
    "large": grad((1, 16, 70, 90), 2),
    "many images": grad((70, 8, 4, 4), 2),
    "weights alone": grad((3, 32, 5, 4), 4, left=(1, 2)),
    "x alone": grad((3, 32, 5, 4), 4, left=(0,)),
}


REFUSED = {
    "another op": (lambda b: b("relu", b.x(2, 8)), "only a group norm's gradient"),
    "nothing": (grad((0, 8, 2, 2), 2), "nothing to normalise"),
    "far too wide": (grad((1, 1 << 13, 1, 1), 1), "8192 channels are too wide"),
}


class TestContract(ImagesContract, GradientContract):
    family, steps, refused = FAMILY, STEPS, REFUSED
    builds = ("odd channels", "large", "no weights")
    configs = (
        (grad((2, 6, 5, 5), 2), config("nchw", 2), "groups are apart"),
        (grad((2, 6, 5, 5), 2), config("nhwc", 4), "4 do not divide"),
        (grad((2, 6, 5, 5), 2), config("nhwc", 2), None),
        (grad((2, 4096, 2, 2), 1), config(), "512 vectors of a pixel"),
        (grad((2, 4096, 2, 2), 1), config(threads=512), None),
    )


def test_each_image_leaves_its_sums(step_of):
    parts = FAMILY.parts(step_of(grad((70, 8, 4, 4), 2), "float16"))
    assert FAMILY.workspace_bytes(parts, config()) == 70 * 2 * 8 * 4
    none = FAMILY.parts(step_of(STEPS["no weights"], "float16"))
    assert FAMILY.workspace_bytes(none, config()) == 0


def test_a_guess_for_training_takes_it():
    layers = nn.Conv2d(16, 64, 3), nn.GroupNorm(8, 64), nn.ReLU()
    assert_guessed_for_training(FAMILY, layers, (32, 16, 16, 16))


@pytest.mark.gpu
class TestOnTheGpu:
    def test_a_pass_has_the_gradients_of_float64(self):
        torch.manual_seed(0)
        layers = nn.Conv2d(8, 32, 3), nn.GroupNorm(4, 32), nn.ReLU(), nn.Conv2d(32, 8, 3)
        module = nn.Sequential(*layers).cuda().half().to(memory_format=torch.channels_last)
        x = torch.randn(16, 8, 12, 12, device="cuda").half()
        x = x.to(memory_format=torch.channels_last)
        seed = torch.randn(16, 8, 8, 8, device="cuda").half()
        assert_a_pass_has_the_gradients_of_float64(module, x, seed)
