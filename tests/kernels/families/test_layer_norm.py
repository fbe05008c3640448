"""Layer norms of rows: which steps, which configs, that they are right."""

from __future__ import annotations

import pytest
from torch.nn.functional import layer_norm

from plantune.base.canonical import Attrs
from plantune.kernels.families.layer_norm import FAMILY
from plantune.kernels.family import Candidate

from .conftest import assert_digits_kept
from .contract import Contract
from .norms import norm_of


def norm(shape, axes=1, affine=2, then=(), kept=()):
    return norm_of("layer_norm", shape, [shape[-axes:]] * affine, then, kept, axes=axes)


STEPS = {
    "rows": norm((5, 96)),
    "images": norm((2, 3, 5, 192), kept=(1, 2)),
    "odd": norm((7, 37), then=("add", "gelu")),
    "no weights": norm((3, 4, 64), affine=0, then=("relu",)),
    "no bias": norm((3, 200), affine=1, kept=(2,)),
    "one element": norm((6, 1)),
    "one row": norm((1, 768), then=("add",)),
    "two axes": norm((3, 6, 20), axes=2),
    "wide": norm((2, 5000), then=("silu",)),
}
CONFIG = Attrs(lanes=32, threads=128)


REFUSED = {
    "another op": (lambda b: b("relu", b.x(2, 8)), "starts with relu"),
    "an early value": (norm((2, 8), then=("relu",), kept=(0,)), "read outside"),
    "a product": (
        lambda b: b("mul", b("layer_norm", b.x(2, 8), axes=1, eps=0.1), b.x(2, 8)),
        "has no place",
    ),
    "statistics alone": (
        lambda b: b.graph.emit("layer_norm", b.x(2, 8), axes=1, eps=0.1)[1],
        "read alone",
    ),
    "a weight": (lambda b: b("layer_norm", b.w(2, 8), axes=1, eps=0.1), "weights"),
    "nothing": (norm((0, 8)), "nothing to normalise"),
    "another dtype": (STEPS["rows"], "got float64", "float64"),
}


class TestContract(Contract):
    family, steps, refused = FAMILY, STEPS, REFUSED
    builds = ("odd", "wide")
    configs = (
        (norm((3, 4096)), Attrs(lanes=32, threads=128), "would hold 128 elements"),
        (norm((3, 4096)), Attrs(lanes=256, threads=128), "has no 256"),
        (norm((3, 4096)), Attrs(lanes=256, threads=256), None),
        (norm((3, 64)), CONFIG, "more than a row has vectors"),
    )


def test_a_row_is_contiguous_whatever_images_are(step_of):
    step = step_of(STEPS["images"], "float16")
    layouts = FAMILY.layouts(FAMILY.parts(step), CONFIG)
    assert layouts["x0"] == layouts["layer_norm"] == "nchw"


@pytest.mark.gpu
def test_numbers_far_from_zero_lose_no_digits(step_of, gpu_space):
    step = step_of(norm((4, 768), affine=0), "float32")
    candidate = Candidate("layer_norm", CONFIG)
    assert_digits_kept(step, candidate, gpu_space, lambda x: layer_norm(x, (768,)))
