"""Pointwise chains as one expression: what is read, where elements lie, that it is right."""

from __future__ import annotations

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.graph.layouts import MEMORY_FORMATS
from plantune.graph.ops import OPS
from plantune.graph.ops.functions import FUNCTIONS
from plantune.graph.types import TensorType
from plantune.kernels.families.pointwise import FAMILY
from plantune.kernels.family import Frame
from plantune.kernels.patterns.pointwise_chain import (
    Geometry,
    cxx_of,
    expression_of,
    geometry_of,
)
from plantune.space.arch import load_arch

from .contract import Contract

COUNTER = TensorType((3,), "int64")
CONFIG = Attrs(layout="nhwc", threads=256, vectors=2)
IMAGE, WIDE = (2, 3, 5, 7), (3, 64, 4, 4)


def conv_tail(b, shape=WIDE):
    y = b("add_channel", b.x(*shape), b.w(shape[1]), axis=1)
    y = b("add", y, b.x(*shape))
    return b("add", b("relu", y), b.w(1))


def every_value(b):
    first = b("affine", b.x(*IMAGE), alpha=2.0, beta=1.0)
    second = b("sigmoid", first)
    return first, second, b("mul", second, first)


def constant_image(b):
    return b("add", b.x(3, 16, 4, 4), b.w(1, 16, 4, 4))


CHAINS = {
    "add": lambda b: b("add", b.x(*IMAGE), b.x(*IMAGE)),
    "add to itself": lambda b: b("add", *[b.x(*IMAGE)] * 2),
    "add a scalar": lambda b: b("add", b.x(*IMAGE), b.w(1)),
    "add a number": lambda b: b("add", b.x(*IMAGE), b.w()),
    "add a row": lambda b: b("add", b.x(5, 7), b.x(7)),
    "add a row of whole vectors": lambda b: b("add", b.x(5, 16), b.x(16)),
    "sub": lambda b: b("sub", b.x(*IMAGE), b.x(*IMAGE)),
    "sub of constants": lambda b: b("sub", b.w(7), b.w(7)),
    "mul by a gate": lambda b: b("mul", b.x(*WIDE), b.x(3, 64, 1, 1)),
    "mul by a row of each image": lambda b: b("mul", b.x(*WIDE), b.x(64, 1, 4)),
    "div by channels": lambda b: b("div", b.x(*WIDE), b.w(64, 1, 1)),
    "casts inside": lambda b: b(
        "cast", b("relu", b("cast", b.x(*IMAGE), dtype="float32")), dtype=b.dtype
    ),
    "add_channel": lambda b: b("add_channel", b.x(*WIDE), b.w(64), axis=1),
    "mul_channel, last axis": lambda b: b("mul_channel", b.x(*IMAGE), b.x(7), axis=3),
    "mul_channel of a weight": lambda b: b("mul_channel", b.w(4, 3, 3, 3), b.w(4), axis=0),
    "affine": lambda b: b("affine", b.x(*IMAGE), alpha=-1.5, beta=0.25),
    "relu of one value": lambda b: b("relu", b.x(1, 1, 1, 1)),
    "relu_grad": lambda b: b("relu_grad", b.x(*IMAGE), b.x(*IMAGE)),
    "add_apart": lambda b: b.apart(b("relu", b.x(*IMAGE))),
    "apart_grad": lambda b: b("apart_grad", b.x(*IMAGE), b.x(*IMAGE), b.w(1)),
    "sigmoid of rows": lambda b: b("sigmoid", b.x(5, 7)),
    "rsqrt": lambda b: b("rsqrt", b.w(19), eps=1e-5),
    "bytes": lambda b: b("affine", b("cast", bytes_of(b), dtype=b.dtype), alpha=1 / 255, beta=-0.5),
    "bytes in words": lambda b: b("cast", bytes_of(b, 2, 8, 4, 4), dtype=b.dtype),
    "broadcast_to": lambda b: b("broadcast_to", b.x(2, 3, 1, 1), shape=IMAGE),
    "broadcast_to, new axes": lambda b: b("broadcast_to", b.x(7), shape=(2, 5, 7)),
    "a value that is broadcast inside": lambda b: b(
        "mul_channel", b.x(*WIDE), b("affine", b.x(64), alpha=0.5, beta=-1.0), axis=1
    ),
    "after a convolution": conv_tail,
    "after a convolution, odd": lambda b: conv_tail(b, (3, 5, 7, 3)),
    "every value leaves": every_value,
    "a constant image": constant_image,
}


def function_and_derivative(name):
    """Both of one number, which is read twice."""

    def emit(b):
        x = b.x(*IMAGE)
        return b(name, x), b(f"{name}_grad", b.x(*IMAGE), x)

    return emit


OF_ONE_NUMBER = {name: function_and_derivative(name) for name in FUNCTIONS}


def test_every_pointwise_op_has_an_expression_and_a_case(step_of):
    written = {name for name in OPS if cxx_of(name) is not None}
    assert written == {name for name, op in OPS.items() if op.pointwise}
    cases = (*CHAINS.values(), *OF_ONE_NUMBER.values())
    assert written == {op for emit in cases for op in step_of(emit).ops}


def test_a_value_is_computed_once(step_of):
    expression = expression_of(step_of(every_value))
    assert expression.lines == (
        "const float v0 = in[0] * 2.0f + 1.0f;",
        "const float v1 = plantune::sigmoid(v0);",
        "const float v2 = v1 * v0;",
    )
    assert expression.results == ("v0", "v1", "v2")


GEOMETRIES = [
    ("add", "nchw", Geometry((210,), ((1,), (1,)), 8)),
    ("add", "nhwc", Geometry((210,), ((1,), (1,)), 8)),
    ("relu of one value", "nhwc", Geometry((1,), ((0,),), 8)),
    ("add_channel", "nhwc", Geometry((48, 64), ((64, 1), (0, 1)), 8)),
    ("add_channel", "nchw", Geometry((3, 64, 16), ((1024, 16, 1), (0, 1, 0)), 8)),
    ("mul by a gate", "nhwc", Geometry((3, 16, 64), ((1024, 64, 1), (64, 0, 1)), 8)),
    ("add a row", "nchw", Geometry((5, 7), ((7, 1), (0, 1)), 1)),
    ("a constant image", "nhwc", Geometry((3, 16, 16), ((256, 16, 1), (0, 1, 16)), 8)),
    ("after a convolution, odd", "nhwc", Geometry((63, 5), ((5, 1), (0, 1), (5, 1), (0, 0)), 1)),
    ("broadcast_to", "nchw", Geometry((6, 35), ((1, 0),), 1)),
]


@pytest.mark.parametrize(("name", "layout", "geometry"), GEOMETRIES)
def test_axes_are_merged_where_every_operand_allows_it(step_of, name, layout, geometry):
    step = step_of(CHAINS[name], "float16")
    assert geometry_of(step, expression_of(step), layout, 8) == geometry


def test_the_batch_is_not_part_of_the_source(step_of):
    sources = [
        FAMILY.source(
            FAMILY.parts(step_of(lambda b, n=n: conv_tail(b, (n, 64, 4, 4)), "float16")),
            CONFIG,
            load_arch("sm90"),
        )
        for n in (1, 2, 129)
    ]
    assert len(set(sources)) == 1


def test_large_tensors_have_long_indices(step_of):
    step = step_of(lambda b: b("relu", b.x(1 << 17, 64, 16, 16)), "float16")
    assert "using Index = unsigned long long;" in FAMILY.source(
        FAMILY.parts(step), CONFIG, load_arch("sm90")
    )


REFUSED = {
    "another op": (
        lambda b: b("relu", b("mean", b.x(*IMAGE), dims=(2, 3), keepdim=False)),
        "mean at 'mean' does not work place by place",
    ),
    "a small value leaves": (
        lambda b: (
            y := b("affine", b.x(3), alpha=0.5, beta=-1.0),
            b("mul_channel", b.x(*IMAGE), y, axis=1),
        ),
        "'affine' leaves as (3,)",
    ),
    "counters": (
        lambda b: b("affine", b.graph.input("n", COUNTER), alpha=1, beta=1),
        "got int64",
    ),
    "sums of bytes": (
        lambda b: b("cast", b("affine", bytes_of(b), alpha=2, beta=1), dtype=b.dtype),
        "got uint8",
    ),
    "nothing": (lambda b: b("relu", b.x(0, 3, 5, 7)), "there is nothing to compute"),
    "many inputs": (
        lambda b: many(b, 9),
        "it takes 8 inputs and 4 outputs at most",
    ),
}


def bytes_of(b, *shape):
    return b.graph.input("bytes", TensorType(shape or IMAGE, "uint8"))


def many(b, count):
    y = b.x(*IMAGE)
    for _ in range(count - 1):
        y = b("add", y, b.x(*IMAGE))
    return y


class TestContract(Contract):
    family, steps, refused, config = FAMILY, CHAINS, REFUSED, CONFIG
    builds = ("after a convolution",)
    configs = (
        (CHAINS["sigmoid of rows"], CONFIG, "not images"),
        (CHAINS["mul_channel of a weight"], CONFIG, "weights"),
    )


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_images_are_demanded_in_a_layout_and_weights_in_none(step_of, layout):
    step = step_of(CHAINS["a constant image"], "float16")
    demanded = FAMILY.layouts(FAMILY.parts(step), Attrs(layout=layout, threads=256, vectors=1))
    assert demanded == {"x0": layout, "add": layout}
    weight = step_of(CHAINS["mul_channel of a weight"], "float16")
    demanded = FAMILY.layouts(FAMILY.parts(weight), Attrs(layout="nchw", threads=256, vectors=1))
    assert demanded == {"mul_channel": "nchw"}


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_weights_are_read_in_nchw_however_they_lie(step_of, monkeypatch, layout):
    read = []

    class Recorder:
        def __init__(self, binary, blocks, threads):
            pass

        def launch(self, stream, arguments, tensors, whole):
            read.extend(tensors)

    monkeypatch.setattr("plantune.kernels.cuda.vector_kernel.VectorKernel", Recorder)
    step = step_of(CHAINS["a constant image"], "float16")
    memory_format = MEMORY_FORMATS[layout]
    values = {
        name: torch.randn(type_.shape).half().contiguous(memory_format=memory_format)
        for name, type_ in (*step.inputs, *step.outputs)
    }
    config = Attrs(layout="nhwc", threads=256, vectors=1)
    binding = FAMILY.bind(FAMILY.parts(step), config, Frame(values))
    for constant in binding.constants:
        if not constant.is_in_place():
            constant.fill()
    binding.launch(0)
    (weight,) = [tensor for tensor in read if torch.equal(tensor, values["w0"])]
    assert weight.is_contiguous()
    assert (weight.data_ptr() == values["w0"].data_ptr()) == (layout == "nchw")


def all_functions(b):
    y = b.x(3, 64)
    for name in FUNCTIONS:
        y = b(f"{name}_grad", b(name, y), y)
    return y


def test_every_function_builds(step_of, build_within_limits):
    step = step_of(all_functions, "float16")
    build_within_limits(FAMILY, step, Attrs(CONFIG, layout="nchw"), load_arch("sm90"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", OF_ONE_NUMBER)
def test_every_function_is_right_on_the_gpu(step_of, assert_legal_configs_right, name, dtype):
    assert_legal_configs_right(FAMILY, step_of(OF_ONE_NUMBER[name], dtype), [CONFIG])
