"""SpaceToDepth and a 1x1 convolution as one oneDNN convolution with strides over the pixels.

Each output reads the block x block patch that SpaceToDepth would move into channels, so the kernel
is that patch and the weight is only seen in another order. Nothing is moved.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from plantune.kernels import onednn
from plantune.kernels.family import Attrs, Binding, Frame, Step
from plantune.kernels.patterns.epilogue import ConvParts
from plantune.kernels.patterns.pointwise_conv import pointwise_conv_after
from plantune.layouts import in_layout


class PatchConv(onednn.OneDnnFamily[ConvParts]):
    """Config: `layout` of images."""

    name: ClassVar = "patch_conv"

    def read(self, step: Step) -> ConvParts:
        parts = ConvParts(step, pointwise_conv_after(step, "space_to_depth", scaled=True))
        parts.epilogue.only_function()
        return parts

    def bind(self, parts: ConvParts, config: Attrs, frame: Frame) -> Binding:
        block, shape = parts.step.nodes[0].attrs["block"], parts.step.types[parts.x].shape
        geometry = onednn.Geometry(stride=(block, block))

        def pack(weight: Tensor) -> Tensor:
            return onednn.pack(
                in_layout(_as_patch(weight, block), config["layout"]), geometry, shape
            )

        return onednn.bound(parts, frame, geometry, pack)


def _as_patch(weight: Tensor, block: int) -> Tensor:
    """(O, block * block * C, 1, 1), channel = (dy * block + dx) * C + c, as (O, C, dy, dx)."""
    return weight.view(weight.shape[0], block, block, -1).permute(0, 3, 1, 2)


FAMILY = PatchConv()
