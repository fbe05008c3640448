"""Gradients of group norms: which steps, which configs, that they are right."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plantune.kernels.families.group_norm_grad import FAMILY
from plantune.space.arch import load_arch

from .conftest import DTYPES, in_turns
from .norms import (
    assert_a_pass_has_the_gradients_of_float64,
    assert_each_layout_of_images,
    assert_guessed_for_training,
    assert_refused,
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


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_runs_every_step(step_of, name, dtype):
    assert_each_layout_of_images(FAMILY, step_of(STEPS[name], dtype))


REFUSED = {
    "another op": (lambda b: b("relu", b.x(2, 8)), "only a group norm's gradient"),
    "nothing": (grad((0, 8, 2, 2), 2), "nothing to normalise"),
    "far too wide": (grad((1, 1 << 13, 1, 1), 1), "8192 channels are too wide"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_run_is_refused_with_the_reason(step_of, name):
    emit, reason = REFUSED[name]
    assert reason in FAMILY.why_not_step(step_of(emit, "float16"))


def test_configs_that_do_not_fit_are_refused_with_the_reason(step_of):
    parts = FAMILY.parts(step_of(grad((2, 6, 5, 5), 2), "float16"))
    reasons = {
        config("nchw", 2): "groups are apart",
        config("nhwc", 4): "4 do not divide",
        config("nhwc", 2): None,
    }
    assert_refused(FAMILY, parts, reasons)
    wide = FAMILY.parts(step_of(grad((2, 4096, 2, 2), 1), "float16"))
    reasons = {config(): "512 vectors of a pixel", config(threads=512): None}
    assert_refused(FAMILY, wide, reasons)


def test_each_image_leaves_its_sums(step_of):
    parts = FAMILY.parts(step_of(grad((70, 8, 4, 4), 2), "float16"))
    assert FAMILY.workspace_bytes(parts, config()) == 70 * 2 * 8 * 4
    none = FAMILY.parts(step_of(STEPS["no weights"], "float16"))
    assert FAMILY.workspace_bytes(none, config()) == 0


def test_a_guess_for_training_takes_it():
    layers = nn.Conv2d(16, 64, 3), nn.GroupNorm(8, 64), nn.ReLU()
    assert_guessed_for_training(FAMILY, layers, (32, 16, 16, 16))


@pytest.mark.parametrize(("arch_name", "name"), in_turns(["odd channels", "large", "no weights"]))
def test_it_builds_within_its_limits(step_of, build_within_limits, arch_name, name):
    arch, step = load_arch(arch_name), step_of(STEPS[name], "float16")
    collects = {"collect", "collect_unaligned"} if name != "no weights" else set()
    for layout, groups in (("nchw", 1), ("nhwc", 2)):
        usage = build_within_limits(FAMILY, step, config(layout, groups, 512), arch)
        assert set(usage) == {"run", "run_unaligned", *collects}
        assert all(used.shared_bytes <= 48 << 10 for used in usage.values())


@pytest.mark.gpu
class TestOnTheGpu:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("name", STEPS)
    def test_it_is_right(self, assert_case_right, name, dtype):
        assert_case_right(FAMILY, STEPS, name, dtype)

    def test_a_pass_has_the_gradients_of_float64(self):
        torch.manual_seed(0)
        layers = nn.Conv2d(8, 32, 3), nn.GroupNorm(4, 32), nn.ReLU(), nn.Conv2d(32, 8, 3)
        module = nn.Sequential(*layers).cuda().half().to(memory_format=torch.channels_last)
        x = torch.randn(16, 8, 12, 12, device="cuda").half()
        x = x.to(memory_format=torch.channels_last)
        seed = torch.randn(16, 8, 8, 8, device="cuda").half()
        assert_a_pass_has_the_gradients_of_float64(module, x, seed)
