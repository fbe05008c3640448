"""Linear layers as 1x1 convolutions: what is read, and what is refused."""

from __future__ import annotations

import pytest

from plantune.errors import IllegalCandidate
from plantune.kernels.families import hopper_conv, implicit_gemm_conv
from plantune.kernels.patterns.epilogue import conv_epilogue
from plantune.kernels.patterns.product_as_conv import as_convolution
from plantune.kernels.registry import candidates, estimate_us
from plantune.space.search_space import load_search_space

FAMILIES = (hopper_conv.FAMILY, implicit_gemm_conv.FAMILY)


def layer(b, m=96, n=32, k=64):
    return b("add_channel", b.linear(b.x(m, k), b.w(n, k)), b.w(n), axis=1)


def in_a_block(b):
    y = b("reshape", layer(b), shape=(2, 6, 8, 32))
    return b("gelu", b("add", y, b.x(2, 6, 8, 32)))


def reshaped_twice(b):
    y = b("reshape", layer(b), shape=(2, 48, 32))
    return b("relu", b("reshape", y, shape=(2, 6, 8, 32)))


LAYERS = {
    "a product alone": (lambda b: b.linear(b.x(96, 64), b.w(32, 64)), ()),
    "with a bias and a function": (lambda b: b("gelu", layer(b)), ("gelu",)),
    "rows of an image": (in_a_block, ("residual", "gelu")),
    "the residual first": (lambda b: b("add", b.x(96, 32), layer(b)), ("residual",)),
    "the function first": (
        lambda b: b("add", b("silu", layer(b)), b.x(96, 32)),
        ("silu", "residual"),
    ),
    "one row": (lambda b: b("tanh", layer(b, m=1)), ("tanh",)),
    "a reshape at the end": (lambda b: b("reshape", layer(b), shape=(12, 8, 32)), ()),
    "reshaped twice": (reshaped_twice, ("relu",)),
    "a bias of the last axis": (
        lambda b: b(
            "add_channel",
            b("reshape", b.linear(b.x(96, 64), b.w(32, 64)), shape=(4, 24, 32)),
            b.w(32),
            axis=2,
        ),
        (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_what_follows_the_product_is_its_epilogue(step_of, name):
    emit, chain = LAYERS[name]
    step = step_of(emit, "float16")
    found = as_convolution(step)
    epilogue = conv_epilogue(found)
    assert epilogue.chain == chain
    assert epilogue.conv.types[0].shape[2:] == (1, 1)
    assert (found.outputs[0][0], found.flops) == (step.outputs[0][0], step.flops)
    assert {name for name, _ in found.inputs} == {name for name, _ in step.inputs}
    for family in FAMILIES:
        assert family.why_not_step(step) is None


def test_rows_that_an_image_counts_stay_rows(step_of):
    step = step_of(in_a_block, "float16")
    for family in FAMILIES:
        layouts = family.layouts(family.parts(step), {})
        image = [n for n, type_ in (*step.inputs, *step.outputs) if len(type_.shape) == 4]
        assert layouts == dict.fromkeys(image, "nchw")


REFUSED = {
    "columns of the weight": (
        lambda b: b("matmul", b.x(96, 64), b.w(64, 32), transpose_a=False, transpose_b=False),
        "contiguous along the inner axis",
    ),
    "two inputs": (lambda b: b.linear(b.x(96, 64), b.x(32, 64)), "weight .* is not constant"),
    "other rows": (
        lambda b: b("relu", b("reshape", layer(b), shape=(48, 64))),
        "not a reshape of the rows",
    ),
    "a value that is read elsewhere": (
        lambda b: (y := layer(b), b("reshape", y, shape=(2, 48, 32))),
        "is read outside of it",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_products_are_refused(step_of, name):
    emit, reason = REFUSED[name]
    with pytest.raises(IllegalCandidate, match=reason):
        conv_epilogue(as_convolution(step_of(emit, "float16")))


def best(family, step, space):
    """The config that a guess likes best."""
    legal = candidates(step, space, [family.name])
    return min(legal, key=lambda candidate: estimate_us(step, candidate, space.arch))


def test_it_builds(step_of, build_within_limits):
    space, step = load_search_space("sm90"), step_of(in_a_block, "float16")
    for family in FAMILIES:
        build_within_limits(family, step, best(family, step, space).config, space.arch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
def test_it_is_right_on_a_gpu(step_of, assert_right, gpu_space, name, dtype):
    step = step_of(LAYERS[name][0], dtype)
    for family in FAMILIES:
        if family.name in gpu_space.families:
            assert_right(step, best(family, step, gpu_space), gpu_space)
