"""What is known of torch's own kernels."""

from __future__ import annotations

import pytest

from plantune.kernels.torch_ops import may_misread_pixels

SAME = {"padding": (1, 1)}


@pytest.mark.parametrize(
    ("channels", "filters", "dtype", "risky"),
    [
        (4, 8, "float32", False),
        (3, 8, "float32", True),
        (4, 6, "float32", True),
        (8, 16, "float16", False),
        (4, 16, "float16", True),
        (2, 2, "float64", False),
    ],
)
def test_pixels_that_are_no_whole_words_may_be_misread(graph_of, channels, filters, dtype, risky):
    """Of images, results and filters: cuDNN reads all of them by pixels."""

    def emit(b):
        return b.conv(b.x(2, channels, 4, 4), b.w(filters, channels, 3, 3), **SAME)

    graph = graph_of(emit, dtype)
    assert may_misread_pixels(graph.nodes[0], graph.types) == risky


def test_other_ops_read_pixels_as_they_are(graph_of):
    graph = graph_of(lambda b: b("relu", b.x(2, 3, 4, 4)), "float32")
    assert not may_misread_pixels(graph.nodes[0], graph.types)
