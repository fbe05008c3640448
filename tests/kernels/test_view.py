from __future__ import annotations

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.graph.layouts import MEMORY_FORMATS
from plantune.kernels.families.view import FAMILY
from plantune.kernels.family import Frame


def permuted(shape, dims):
    return lambda b: b("permute", b.x(*shape), dims=dims)


def test_what_moves_elements_is_no_view(step_of, refusal):
    reason = "only reshapes and permutes are views"
    assert refusal(step_of(lambda b: b("relu", b.x(2, 3))), "view") == reason
    two = step_of(lambda b: b("relu", b("reshape", b.x(2, 3), shape=(6,))))
    assert refusal(two, "view") == reason
    assert refusal(step_of(lambda b: b("reshape", b.x(2, 3), shape=(6,))), "view") is None
    assert "in another order" in refusal(step_of(permuted((2, 3), (1, 0))), "view")
    assert "in another order" in refusal(step_of(permuted((2, 3, 4, 5), (3, 2, 1, 0))), "view")
    weight = step_of(lambda b: b("permute", b.w(2, 3, 4, 5), dims=(0, 2, 3, 1)))
    assert "a weight" in refusal(weight, "view")


@pytest.mark.parametrize(
    ("shape", "dims", "layouts"),
    [
        ((2, 3, 4, 5), (0, 2, 3, 1), ("nhwc", "nchw")),
        ((2, 4, 5, 3), (0, 3, 1, 2), ("nchw", "nhwc")),
        ((2, 3, 1, 1), (0, 2, 3, 1), ("nchw", "nchw")),
        ((2, 1, 3), (1, 0, 2), ("nchw", "nchw")),
    ],
)
def test_a_permute_is_a_view_between_layouts(step_of, shape, dims, layouts):
    step = step_of(permuted(shape, dims))
    parts = FAMILY.parts(step)
    assert tuple(FAMILY.layouts(parts, Attrs()).values()) == layouts
    x = torch.randn(shape)
    x = x.contiguous(memory_format=MEMORY_FORMATS[layouts[0]]) if len(shape) == 4 else x
    values = {"x0": x}
    FAMILY.bind(parts, Attrs(), Frame(values)).launch(0)
    made = values["permute"]
    assert made.data_ptr() == x.data_ptr()
    assert torch.equal(made, x.permute(dims))
    formats = {"memory_format": MEMORY_FORMATS[layouts[1]]} if len(shape) == 4 else {}
    assert made.is_contiguous(**formats)


def rows_of_pixels(b):
    return b("permute", b("reshape", b.x(2, 6, 4, 5), shape=(2, 6, 20)), dims=(0, 2, 1))


def image_of_rows(b):
    return b("reshape", b("permute", b.x(2, 20, 6), dims=(0, 2, 1)), shape=(2, 6, 4, 5))


CHAINS = {
    "rows of pixels": (rows_of_pixels, ("nhwc", "nchw")),
    "an image of rows": (image_of_rows, ("nchw", "nhwc")),
    "there and back": (
        lambda b: b("reshape", rows_of_pixels(b), shape=(40, 6)),
        ("nhwc", "nchw"),
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_a_view_if_no_element_moves(step_of, name):
    emit, (read, made) = CHAINS[name]
    step = step_of(emit)
    parts = FAMILY.parts(step)
    (result, type_), *_ = step.outputs
    assert FAMILY.layouts(parts, Attrs()) == {"x0": read, result: made}
    x = torch.randn(step.types["x0"].shape)
    x = x.contiguous(memory_format=MEMORY_FORMATS[read]) if x.dim() == 4 else x
    values = {"x0": x}
    FAMILY.bind(parts, Attrs(), Frame(values)).launch(0)
    assert values[result].data_ptr() == x.data_ptr()
    assert values[result].stride() == type_.strides(made)
    assert torch.equal(values[result], step.evaluate({"x0": x})[result])


@pytest.mark.parametrize(
    ("emit", "reason"),
    [
        (
            lambda b: b("reshape", b("reshape", b.x(2, 6), shape=(12,)), shape=(3, 4)),
            "one by one",
        ),
        (
            lambda b: b("reshape", b("permute", b.x(2, 3, 4), dims=(1, 0, 2)), shape=(6, 4)),
            "in another order",
        ),
        (lambda b: (rows_of_pixels(b), b.graph.nodes[0].name), "read by others"),
    ],
)
def test_other_chains_are_none(step_of, refusal, emit, reason):
    assert reason in refusal(step_of(emit), "view")


def test_it_has_one_config(step_of, refusal):
    step = step_of(lambda b: b("reshape", b.x(2, 3), shape=(6,)))
    assert "is not in the search space" in refusal(step, "view", layout="nchw")


def test_it_is_a_view_of_whatever_its_input_is_in_each_launch(step_of):
    step = step_of(lambda b: b("reshape", b.x(2, 3, 1, 1), shape=(2, 3)))
    assert FAMILY.aliases(FAMILY.parts(step), Attrs()) == {"reshape": "x0"}
    assert FAMILY.layouts(FAMILY.parts(step), Attrs()) == {"x0": "nchw", "reshape": "nchw"}
    values = {}
    binding = FAMILY.bind(FAMILY.parts(step), Attrs(), Frame(values))
    for _ in range(2):
        values["x0"] = torch.randn(2, 3, 1, 1)
        binding.launch(0)
        assert values["reshape"].data_ptr() == values["x0"].data_ptr()
        assert torch.equal(values["reshape"], values["x0"].flatten(1))
