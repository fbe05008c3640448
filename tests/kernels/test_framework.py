from __future__ import annotations

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.graph.layouts import aligned
from plantune.graph.ops import OPS
from plantune.kernels import torch_ops
from plantune.kernels.families.framework import FAMILY
from plantune.kernels.family import Frame
from plantune.measure.inputs import draw_inputs
from plantune.space.arch import load_arch

NCHW, NHWC = Attrs(layout="nchw"), Attrs(layout="nhwc")


@pytest.fixture
def chain(step_of):
    """conv -> relu -> sigmoid, of which only the end is read."""
    return step_of(
        lambda b: b("sigmoid", b("relu", b.conv(b.x(2, 3, 6, 6), b.w(4, 3, 3, 3), padding=(1, 1))))
    )


def test_it_runs_every_step(chain, refusal):
    assert refusal(chain, "framework", layout="nchw") is None
    assert refusal(chain, "framework", layout="nhwc") is None


def test_a_config_that_is_not_in_the_space_is_refused(chain, refusal):
    assert refusal(chain, "framework", layout="chwn") == (
        "{'layout': 'chwn'} is not in the search space of cpu"
    )
    assert "is not in the search space" in refusal(chain, "framework")


def test_images_are_made_in_the_layout_of_the_config(chain):
    assert FAMILY.layouts(FAMILY.parts(chain), NHWC) == {"x0": "nhwc", "sigmoid": "nhwc"}
    assert FAMILY.layouts(FAMILY.parts(chain), NCHW) == {"x0": "nchw", "sigmoid": "nchw"}


def test_pointwise_ops_take_images_in_any_layout(step_of):
    step = step_of(lambda b: b("relu", b.x(2, 3, 4, 5)))
    assert FAMILY.layouts(FAMILY.parts(step), NHWC) == {"relu": "nhwc"}


def test_gradients_of_weights_are_images_and_vectors_keep_their_layout(step_of):
    geometry = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
    wgrad = step_of(
        lambda b: b(
            "conv2d_wgrad", b.x(2, 4, 4, 4), b.x(2, 3, 6, 6), shape=(4, 3, 3, 3), **geometry
        )
    )
    assert FAMILY.layouts(FAMILY.parts(wgrad), NHWC) == {
        "x0": "nhwc",
        "x1": "nhwc",
        "conv2d_wgrad": "nhwc",
    }
    matrix = step_of(lambda b: b.linear(b.x(2, 3), b.w(4, 3)))
    assert FAMILY.layouts(FAMILY.parts(matrix), NHWC) == {"matmul": "nchw"}


def test_batch_norm_takes_images_in_the_layout_in_which_it_makes_them(step_of):
    """torch's kernel writes by the strides of its input, even into memory of another layout."""
    step = step_of(
        lambda b: b(
            "batch_norm", b.x(2, 3, 4, 4), b.w(3), b.w(3), b.x(3), b.x(3), eps=1e-5, momentum=0.1
        )
    )
    assert FAMILY.layouts(FAMILY.parts(step), NHWC)["x0"] == "nhwc"
    assert FAMILY.layouts(FAMILY.parts(step), NCHW)["x0"] == "nchw"


def test_what_torch_cannot_write_elsewhere_is_adopted(step_of):
    conv = step_of(lambda b: b.conv(b.x(2, 3, 6, 6), b.w(4, 3, 3, 3)))
    assert FAMILY.adopts(FAMILY.parts(conv), NCHW) == {"conv2d"}
    assert FAMILY.adopts(FAMILY.parts(step_of(lambda b: b("relu", b.x(2, 3)))), NCHW) == set()
    assert not torch_ops.writes("conv2d")
    assert {op for op in OPS if not torch_ops.writes(op)} == {
        "conv2d", "conv2d_dgrad", "conv2d_wgrad", "batch_norm_grad", "batch_norm_again",
        "max_pool2d_taps", "max_pool2d_taps_grad",
        "layer_norm", "layer_norm_grad", "group_norm", "group_norm_grad", "gru_translate",
        "gru_scan", "gru_scan_grad", "lstm_scan", "lstm_scan_grad", "add_apart", "apart_grad",
        "own_gradient",
    }  # fmt: skip


def test_inner_values_lie_in_the_workspace_and_the_rest_is_dropped(chain, space):
    assert FAMILY.workspace_bytes(FAMILY.parts(chain), NCHW) == aligned(2 * 4 * 36 * 4)
    assert FAMILY.adopts(FAMILY.parts(chain), NCHW) == set()
    values = draw_inputs(chain, torch.Generator().manual_seed(0))
    values["sigmoid"] = torch.empty(2, 4, 6, 6)
    workspace = torch.empty(FAMILY.workspace_bytes(FAMILY.parts(chain), NCHW), dtype=torch.uint8)
    binding = FAMILY.bind(FAMILY.parts(chain), NCHW, Frame(values, workspace))
    binding.launch(0)
    assert values["relu"].data_ptr() == workspace.data_ptr()
    assert "conv2d" not in values
    torch.testing.assert_close(values["sigmoid"], chain.evaluate(values)["sigmoid"])


def test_where_torch_returns_views_none_is_made_new_if_the_frame_says_so(step_of):
    def halves(b):
        attrs = {"arguments": '{"chunks":2,"dim":1,"self":{"tensor":0}}'}
        return b.graph.emit("aten.chunk.default", b.x(2, 6), **attrs)

    step = step_of(halves)
    parts, (first, second) = FAMILY.parts(step), [name for name, _ in step.outputs]
    assert FAMILY.leaves_loose(parts, NCHW) == {first: "x0", second: "x0"}
    assert FAMILY.reads_loose(parts, NCHW) == {"x0"}
    x = torch.randn(2, 6)
    values = {"x0": x}
    FAMILY.bind(parts, NCHW, Frame(values, loose=frozenset((second,)))).launch(0)
    assert values[second].data_ptr() == x[:, 3:].data_ptr()
    assert values[first].is_contiguous()
    assert torch.equal(torch.cat((values[first], values[second]), 1), x)


def test_an_image_that_a_convolution_reads_is_dense(step_of):
    conv = FAMILY.parts(step_of(lambda b: b.conv(b.x(2, 3, 6, 6), b.w(4, 3, 3, 3))))
    assert FAMILY.reads_loose(conv, NHWC) == frozenset()
    assert FAMILY.leaves_loose(conv, NHWC) == {}


def _conv(b):
    return b.conv(b.x(128, 256, 8, 8), b.w(512, 256, 1, 1), stride=(2, 2))


def _taps(b):
    window = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1)}
    return b("max_pool2d_taps", b.x(128, 64, 16, 16), **window)


def _taps_gradient(b):
    window = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1)}
    dy, taps = b.x(128, 64, 8, 8), b.x(128, 64, 8, 8, dtype="uint8")
    return b("max_pool2d_taps_grad", dy, taps, shape=(128, 64, 16, 16), **window)


# In microseconds on an H200, float16, 2026-11-23.
MEASURED = [
    (lambda b: b("relu", b.x(128, 256, 8, 8)), NCHW, 2.5),
    (lambda b: b("relu", b.x(8192, 64, 16, 16)), NCHW, 135.2),
    (lambda b: b("add", b.x(128, 2048, 1, 1), b.x(128, 2048, 1, 1)), NHWC, 1.3),
    (_conv, NCHW, 24.8),
    (lambda b: b.conv(b.x(2048, 128, 8, 8), b.w(128, 128, 3, 3), padding=(1, 1)), NHWC, 59.0),
    (_taps, NCHW, 50.2),
    (_taps_gradient, NCHW, 36.1),
]


@pytest.mark.parametrize("index", range(len(MEASURED)))
def test_a_guess_is_near_to_what_was_measured(step_of, index):
    """A search that takes torch's op for quick measures it instead of a kernel."""
    emit, config, measured_us = MEASURED[index]
    step = step_of(emit, "float16")
    guess_us = FAMILY.estimate_us(FAMILY.parts(step), config, load_arch("sm90"))
    assert measured_us / 1.5 < guess_us < 1.5 * measured_us
