"""Linear layers, and convolutions of few channels, as convolutions of many."""

from __future__ import annotations

import pytest
import torch

from plantune.devices.cuda.flags import planned_for
from plantune.errors import IllegalCandidate
from plantune.kernels.families import hopper_conv, implicit_gemm_conv
from plantune.kernels.patterns.epilogue import conv_epilogue
from plantune.kernels.patterns.other_step import as_convolution, filter_arrangement
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


def patches(*parts, x=(2, 4, 24, 32), w=(32, 4, 8, 8), stride=(4, 4), padding=(0, 0)):
    def emit(b):
        y = b.conv(b.x(*x), b.w(*w), stride=stride, padding=padding)
        for part in parts:
            y = b(part, y, b.w(w[0]), axis=1) if part.endswith("channel") else b(part, y)
        return y

    return emit


WIDE = {
    "four pixels": (patches("add_channel", "relu"), (32, 16, 8, 2)),
    "padded by whole pixels": (patches(padding=(3, 4)), (32, 16, 8, 2)),
    "no overlap": (patches("mul_channel", "gelu", w=(16, 4, 4, 4)), (16, 16, 4, 1)),
    "two pixels": (patches(stride=(1, 2), w=(8, 4, 3, 4)), (8, 8, 3, 2)),
    "odd pixels": (patches(x=(1, 3, 32, 32), w=(64, 3, 8, 8), stride=(8, 8)), (64, 24, 8, 1)),
}


# Of so few channels that one family alone moves them.
NARROW = {
    "three channels": (patches(x=(2, 3, 24, 32), w=(32, 3, 8, 8)), (32, 12, 8, 2)),
    "a patch": (patches("add_channel", x=(2, 3, 16, 16), w=(96, 3, 4, 4)), (96, 12, 4, 1)),
}


@pytest.mark.parametrize("name", NARROW)
def test_pixels_of_three_channels_make_one_that_cutlass_moves(step_of, name):
    emit, filter_shape = NARROW[name]
    step, (hopper, cutlass) = step_of(emit, "float16"), FAMILIES
    parts = cutlass.parts(step)
    assert parts.step.types[parts.weight].shape == filter_shape
    assert parts.access(best(cutlass, step, load_search_space("sm90")).config) == 4
    assert "pixels of 12" in hopper.why_not_step(step)


@pytest.mark.parametrize("name", WIDE)
def test_pixels_that_a_stride_steps_over_are_one(step_of, name):
    emit, filter_shape = WIDE[name]
    step = step_of(emit, "float16")
    for family in FAMILIES:
        parts = family.parts(step)
        assert parts.step.types[parts.weight].shape == filter_shape
        assert parts.step.flops == step.flops
        layouts = family.layouts(parts, {})
        assert layouts == dict.fromkeys([step.inputs[0][0], step.outputs[0][0]], "nhwc")


def test_the_wide_convolution_is_the_same(step_of):
    step = step_of(WIDE["padded by whole pixels"][0])
    wide = as_convolution(step)
    (x, x_type), (w, w_type) = step.inputs
    image = torch.randn(x_type.shape).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(w_type.shape)
    form = filter_arrangement(wide, w)
    filters = form.order(weight)
    assert filters.shape == form.shape
    pixels = image.permute(0, 2, 3, 1).reshape(2, 24, 8, 16).permute(0, 3, 1, 2)
    found = wide.evaluate({x: pixels, w: filters.permute(0, 3, 1, 2)})
    exact = step.evaluate({x: image, w: weight})
    torch.testing.assert_close(found[wide.nodes[0].name], exact[step.nodes[0].name])


@pytest.mark.parametrize(
    "emit",
    [
        patches(x=(2, 4, 24, 30)),
        patches(w=(32, 4, 8, 6)),
        patches(padding=(0, 2)),
        patches(x=(2, 3, 24, 32), w=(32, 3, 8, 8), stride=(2, 2)),
        patches(x=(2, 6, 24, 32), w=(32, 6, 8, 8), stride=(2, 2)),
    ],
)
def test_pixels_that_do_not_make_whole_ones_stay(step_of, emit):
    step = step_of(emit, "float16")
    assert as_convolution(step) is step
    assert hopper_conv.FAMILY.why_not_step(step) is not None


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
    step = step_of(WIDE["four pixels"][0], "float16")
    build_within_limits(FAMILIES[0], step, best(FAMILIES[0], step, space).config, space.arch)


def flat(b, x=(3, 8, 4, 5)):
    rows = b("reshape", b.x(*x), shape=(x[0], x[1] * x[2] * x[3]))
    y = b.linear(rows, b.w(16, x[1] * x[2] * x[3]))
    return b("relu", b("add_channel", y, b.w(16), axis=1))


FLAT = {"a flat image": (flat,)}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", [*LAYERS, *WIDE, *NARROW, *FLAT])
def test_it_is_right_on_a_gpu(step_of, assert_right, gpu_space, name, dtype):
    step = step_of((LAYERS | WIDE | NARROW | FLAT)[name][0], dtype)
    for family in FAMILIES[name in NARROW :]:
        if family.name in gpu_space.families:
            assert_right(step, best(family, step, gpu_space), gpu_space)


def test_a_flat_image_is_a_row_of_its_pixels(step_of):
    step = step_of(flat)
    wide = as_convolution(step)
    assert wide.layouts == {"x0": "nhwc"}
    form = filter_arrangement(wide, "w0")
    image, weight, bias = torch.randn(3, 8, 4, 5), torch.randn(16, 160), torch.randn(16)
    filters = form.order(weight)
    assert filters.shape == form.shape == (16, 4, 5, 8)
    rows = image.permute(0, 2, 3, 1).reshape(3, 160, 1, 1)
    found = wide.evaluate({"x0": rows, "w0": filters.reshape(16, 160, 1, 1), "w1": bias})
    exact = step.evaluate({"x0": image, "w0": weight, "w1": bias})
    (name, _), *_ = step.outputs
    torch.testing.assert_close(found[name].flatten(1), exact[name])
    for family in FAMILIES:
        assert family.why_not_step(step_of(flat, "float16")) is None


def read_twice(b):
    rows = b("reshape", b.x(3, 8, 4, 5), shape=(3, 160))
    return b("add", b.linear(rows, b.w(160, 160)), rows)


@pytest.mark.parametrize(
    ("emit", "reason"),
    [
        (lambda b: b("reshape", b.x(3, 8, 4, 5), shape=(3, 160)), "laid flat for a product"),
        (lambda b: flat(b, (3, 160, 1, 1)), "single pixels is a row"),
        (lambda b: b.linear(b("reshape", b.x(3, 8, 4), shape=(3, 32)), b.w(8, 32)), "laid flat"),
        (read_twice, "something else reads the flat image"),
    ],
)
def test_other_flat_images_stay_rows(step_of, emit, reason):
    with pytest.raises(IllegalCandidate, match=reason):
        as_convolution(step_of(emit))


@pytest.mark.parametrize("conv", ["ieee", "tf32"])
@pytest.mark.parametrize("matmul", ["ieee", "tf32"])
def test_a_product_of_rows_is_rounded_as_torch_rounds_products(step_of, conv, matmul):
    step, space = step_of(layer, "float32"), load_search_space("sm80")
    with planned_for((conv, matmul, "ieee")):
        found = {
            c.config["math"] for c in candidates(step, space) if c.family == "implicit_gemm_conv"
        }
    assert found == ({"simt", "tf32"} if matmul == "tf32" else {"simt"})
