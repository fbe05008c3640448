"""3x3 convolutions with fewer multiplications: Winograd tiles, Karatsuba on 2x2 images.

`csrc/cpu/winograd.cpp` transforms a block of tiles, multiplies it with panels of transformed
weights and transforms it back, while all of that is in the cache of one core. Weights are
transformed on refresh.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import torch
from torch import Tensor

from plantune.graph import Step
from plantune.kernels.cpu import direct
from plantune.kernels.family import Attrs, Binding, Frame, refuse
from plantune.kernels.patterns.epilogue import ConvParts, usual_parts

# G of each algorithm: transforms a row of three weights into the factors of its products.
WEIGHT_TRANSFORMS: dict[str, list[list[float]]] = {
    "winograd": [[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]],
    "karatsuba": [[1, -1, 0], [0, 1, 0], [0, -1, 1]],
}
# Of fewer, guesses leave a step to other families: of channels, because the transforms cost more
# than they save; of Winograd's tiles, because 16 factors are read for 9 weights. One image
# of 256 x 4 x 4 took 154 us where no cache held them, directly 112 (an EPYC, 2026-11-28).
FEW_CHANNELS, FEW_TILES = 8, 8


class WinogradConv(direct.DirectConvFamily):
    """Config: `layout`, which is nhwc: the transforms work on all channels of a pixel at once."""

    name: ClassVar = "winograd"
    unit: ClassVar = name
    build_s: ClassVar = 2.5
    more: ClassVar = (ctypes.c_void_p, ctypes.c_int)  # memory for so many threads
    subtracts_pixels: ClassVar = True

    def entry(self, parts: ConvParts) -> str:
        attrs: Any = parts.conv.attrs
        is_tile = parts.step.types[parts.x].shape[2:] == (2, 2) and attrs["padding"] == (1, 1)
        return "karatsuba" if is_tile else "winograd"

    def read(self, step: Step) -> ConvParts:
        parts = direct.require_fitting(usual_parts(step))
        attrs = parts.conv.attrs
        dense = attrs["stride"] == attrs["dilation"] == (1, 1)
        kernel = step.types[parts.weight].shape[2:]
        refuse({"only 3x3 convolutions of stride 1": kernel != (3, 3) or not dense})
        return parts

    def can_be_guessed(self, parts: ConvParts, config: Attrs) -> bool:
        many = tiles(parts) >= FEW_TILES or self.entry(parts) == "karatsuba"
        return many and parts.step.types[parts.x].shape[1] >= FEW_CHANNELS

    def workspace_bytes(self, parts: ConvParts, config: Attrs) -> int:
        channels = parts.step.types[parts.x].shape[1]
        return torch.get_num_threads() * scratch_bytes(tiles(parts), channels)

    def bind(self, parts: ConvParts, config: Attrs, frame: Frame) -> Binding:
        transform = WEIGHT_TRANSFORMS[self.entry(parts)]
        conv = direct.sizes(parts, (3, 3), parts.conv.attrs)
        assert frame.workspace is not None
        # As many threads as there is memory for: another number may run when calls come.
        threads = frame.workspace.nbytes // scratch_bytes(tiles(parts), conv.channels)

        def filters(weight: Tensor) -> Tensor:
            return transformed(weight, transform)

        return self.bound(parts, frame, conv, filters, (frame.scratch, threads))


def tiles(parts: ConvParts) -> int:
    """How many tiles of 2x2 cover all images."""
    count, _, rows, columns = parts.conv.types[0].shape
    return count * -(-rows // 2) * -(-columns // 2)


def scratch_bytes(tiles: int, channels: int) -> int:
    """Of a thread, as the kernel's `winograd_scratch` says: 16 places of up to 32 tiles, a line
    after each place, and one pixel of zeros.
    """
    return 4 * (16 * (min(32, tiles) * channels + 16) + channels)


def transformed(weight: Tensor, transform: list[list[float]]) -> Tensor:
    """The factors of each filter; computed in float64."""
    g = torch.tensor(transform, dtype=torch.float64)
    return torch.einsum("ap,bq,ocpq->ocab", g, g, weight.double()).float()


FAMILY = WinogradConv()
