"""Tensors over plain bytes, and torch's words for layouts."""

from __future__ import annotations

import torch
from torch import Tensor

from plantune.graph.types import TensorType

# Enough for every vector load, cache line and tensor copy of a GPU; CPUs need less.
ALIGNMENT_BYTES = 256
HOST_MEMORY = torch.device("cpu")
MEMORY_FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}


def aligned(size_bytes: int) -> int:
    """`size_bytes` rounded up to the alignment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def view_bytes(memory: Tensor, start: int, type_: TensorType, layout: str) -> Tensor:
    """A tensor of that type and layout over `memory` (uint8) from byte `start` on."""
    flat = memory[start : start + type_.size_bytes].view(type_.torch_dtype)
    return flat.as_strided(type_.shape, type_.strides(layout))


def moves(type_: TensorType, made: str, read: str) -> bool:
    """Whether the layout changes where elements are: it does not for images of single pixels."""

    def matters(layout: str) -> list[int]:
        return [s for s, size in zip(type_.strides(layout), type_.shape, strict=True) if size > 1]

    return made != read and matters(made) != matters(read)


def in_layout(tensor: Tensor, layout: str) -> Tensor:
    """`tensor` itself if it is stored in `layout`, else a copy that is."""
    return tensor.contiguous(memory_format=MEMORY_FORMATS[layout])


def same_places(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether elements are where these strides have them: those of axes of one element mean
    nothing.
    """
    pairs = zip(tensor.stride(), strides, tensor.shape, strict=True)
    return all(own == other for own, other, size in pairs if size > 1)


def strictly_in_layout(tensor: Tensor, layout: str) -> Tensor:
    """`in_layout`, by its strides too: an image of one pixel is in both layouts at once, and torch
    chooses the kernel by strides that say nothing.
    """
    format_ = MEMORY_FORMATS[layout]
    strides = torch.empty(tensor.shape, device="meta", memory_format=format_).stride()
    return in_layout(tensor, layout).as_strided(tensor.shape, strides)
