"""Slices of an image's channels, read where they are: a pixel is wider than what is read of it."""

from __future__ import annotations

import json

from torch import Tensor

from plantune.base.canonical import words
from plantune.graph import Node, TensorType
from plantune.graph.ops.overload import ARGUMENTS

SLICERS = frozenset(
    f"aten.{name}"
    for name in words(
        "chunk.default narrow.default slice.Tensor split.Tensor split_with_sizes.default"
    )
)
CHANNELS = 1


def cuts_channels(node: Node, source: TensorType) -> bool:
    """Whether torch makes slices of the channels of an image here, without a gap in a pixel."""
    if node.op not in SLICERS or len(source.shape) != 4:
        return False
    given = json.loads(node.attrs[ARGUMENTS])
    along, step = int(given.get("dim", 0)) % 4, int(given.get("step", 1))
    return along == CHANNELS and step == 1


def pitch_of(image: Tensor) -> int:
    """Elements from one pixel to the next, of an image in nhwc or a slice of its channels."""
    images, channels, rows, columns = image.shape
    if images > 1:
        return image.stride(0) // (rows * columns)
    if rows > 1:
        return image.stride(2) // columns
    return image.stride(3) if columns > 1 else channels
