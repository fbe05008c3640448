"""Group norms of images: which steps, which configs, that they are right."""

from __future__ import annotations

import pytest
from torch.nn.functional import group_norm

from plantune.kernels.families.group_norm import FAMILY
from plantune.kernels.family import Candidate
from plantune.space.arch import load_arch

from .conftest import DTYPES, assert_digits_kept, in_turns
from .norms import assert_each_layout_of_images, assert_refused, norm_of
from .norms import grouped as config


def norm(shape, groups, affine=2, then=(), kept=()):
    return norm_of("group_norm", shape, [shape[1:2]] * affine, then, kept, groups=groups)


STEPS = {
    "images": norm((2, 64, 7, 8), 8, kept=(1, 2)),
    "residual and relu": norm((2, 32, 9, 5), 8, then=("add", "relu")),
    "odd channels": norm((3, 6, 5, 5), 2, then=("silu",)),
    "one group": norm((2, 24, 3, 3), 1, affine=0),
    "a group of each channel": norm((2, 16, 4, 4), 16, affine=1),
    "several groups in a vector": norm((2, 64, 9, 7), 32, then=("relu",), kept=(1, 2)),
    "rows": norm((5, 48), 4),
    "pixels in a row": norm((2, 8, 40), 2, then=("relu",)),
    "one pixel": norm((4, 64, 1, 1), 4),
    "large": norm((1, 16, 70, 90), 2, then=("add", "relu")),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_runs_every_step(step_of, name, dtype):
    assert_each_layout_of_images(FAMILY, step_of(STEPS[name], dtype))


def test_configs_that_do_not_fit_are_refused_with_the_reason(step_of):
    parts = FAMILY.parts(step_of(norm((2, 6, 5, 5), 2), "float16"))
    reasons = {
        config("nchw", 2): "groups are apart",
        config("nhwc", 4): "4 do not divide",
        config("nhwc", 2): None,
    }
    assert_refused(FAMILY, parts, reasons)
    wide = FAMILY.parts(step_of(norm((2, 4096, 2, 2), 1), "float16"))
    assert_refused(FAMILY, wide, {config(): "too many"})
    rows = FAMILY.parts(step_of(STEPS["rows"], "float16"))
    assert_refused(FAMILY, rows, {config(): "only images"})


def test_another_op_is_refused(step_of):
    assert "not with a group_norm" in FAMILY.why_not_step(
        step_of(lambda b: b("relu", b.x(2, 8)), "float16")
    )


@pytest.mark.parametrize(("arch_name", "name"), in_turns(["several groups in a vector", "large"]))
def test_it_builds_within_its_limits(step_of, build_within_limits, arch_name, name):
    arch, step = load_arch(arch_name), step_of(STEPS[name], "float16")
    for layout, groups in (("nchw", 1), ("nhwc", 2)):
        usage = build_within_limits(FAMILY, step, config(layout, groups, 512), arch)
        assert all(used.shared_bytes <= 48 << 10 for used in usage.values())


@pytest.mark.gpu
class TestOnTheGpu:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("name", STEPS)
    def test_it_is_right(self, assert_case_right, name, dtype):
        assert_case_right(FAMILY, STEPS, name, dtype)

    @pytest.mark.parametrize("layout", ["nchw", "nhwc"])
    def test_numbers_far_from_zero_lose_no_digits(self, step_of, gpu_space, layout):
        step = step_of(norm((2, 16, 30, 30), 2, affine=0), "float32")
        candidate = Candidate("group_norm", config(layout))
        assert_digits_kept(step, candidate, gpu_space, lambda x: group_norm(x, 2))
