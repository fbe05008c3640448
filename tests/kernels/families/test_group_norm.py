"""Group norms of images: which steps, which configs, that they are right."""

from __future__ import annotations

from typing import ClassVar

import pytest
from torch.nn.functional import group_norm

from plantune.kernels.families.group_norm import FAMILY
from plantune.kernels.family import Candidate

from .conftest import assert_digits_kept
from .norms import ImagesContract, norm_of
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


class TestContract(ImagesContract):
    family, steps = FAMILY, STEPS
    builds = ("several groups in a vector", "large")
    refused: ClassVar = {"another op": (lambda b: b("relu", b.x(2, 8)), "not with a group_norm")}
    configs = (
        (norm((2, 6, 5, 5), 2), config("nchw", 2), "groups are apart"),
        (norm((2, 6, 5, 5), 2), config("nhwc", 4), "4 do not divide"),
        (norm((2, 6, 5, 5), 2), config("nhwc", 2), None),
        (norm((2, 4096, 2, 2), 1), config(), "too many"),
        (STEPS["rows"], config(), "only images"),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_numbers_far_from_zero_lose_no_digits(step_of, gpu_space, layout):
    step = step_of(norm((2, 16, 30, 30), 2, affine=0), "float32")
    candidate = Candidate("group_norm", config(layout))
    assert_digits_kept(step, candidate, gpu_space, lambda x: group_norm(x, 2))
