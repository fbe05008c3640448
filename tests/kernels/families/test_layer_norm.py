"""Layer norms of rows: which steps, which configs, that they are right."""

from __future__ import annotations

import pytest
from torch.nn.functional import layer_norm

from plantune.base.canonical import Attrs
from plantune.kernels.families.layer_norm import FAMILY
from plantune.kernels.family import Candidate
from plantune.space.arch import load_arch

from .conftest import DTYPES, assert_digits_kept, in_turns, legal
from .norms import assert_refused, norm_of


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


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_runs_every_step(step_of, name, dtype):
    assert legal(FAMILY, step_of(STEPS[name], dtype))


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
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_run_is_refused_with_the_reason(step_of, name):
    emit, reason = REFUSED[name]
    assert reason in FAMILY.why_not_step(step_of(emit, "float16"))


def test_other_dtypes_are_refused(step_of):
    assert "got float64" in FAMILY.why_not_step(step_of(STEPS["rows"], "float64"))


def test_lanes_fit_the_row(step_of):
    parts = FAMILY.parts(step_of(norm((3, 4096)), "float16"))
    reasons = {
        Attrs(lanes=32, threads=128): "would hold 128 elements",
        Attrs(lanes=256, threads=128): "has no 256",
        Attrs(lanes=256, threads=256): None,
    }
    assert_refused(FAMILY, parts, reasons)
    narrow = FAMILY.parts(step_of(norm((3, 64)), "float16"))
    assert_refused(FAMILY, narrow, {CONFIG: "more than a row has vectors"})


def test_a_row_is_contiguous_whatever_images_are(step_of):
    step = step_of(STEPS["images"], "float16")
    layouts = FAMILY.layouts(FAMILY.parts(step), CONFIG)
    assert layouts["x0"] == layouts["layer_norm"] == "nchw"


@pytest.mark.parametrize(("arch_name", "name"), in_turns(["odd", "wide"]))
def test_it_builds_within_its_limits(step_of, build_within_limits, arch_name, name):
    step = step_of(STEPS[name], "float16")
    config = legal(FAMILY, step, arch_name)[-1].config
    usage = build_within_limits(FAMILY, step, config, load_arch(arch_name))
    assert set(usage) == {"run", "run_unaligned"}


@pytest.mark.gpu
class TestOnTheGpu:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("name", STEPS)
    def test_it_is_right(self, assert_case_right, name, dtype):
        assert_case_right(FAMILY, STEPS, name, dtype)

    def test_numbers_far_from_zero_lose_no_digits(self, step_of, gpu_space):
        step = step_of(norm((4, 768), affine=0), "float32")
        candidate = Candidate("layer_norm", CONFIG)
        assert_digits_kept(step, candidate, gpu_space, lambda x: layer_norm(x, (768,)))
