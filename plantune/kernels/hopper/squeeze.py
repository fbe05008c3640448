"""Squeeze-and-excite after a convolution, as the Hopper kernels have it in shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

from plantune.devices.cuda.structs import fields
from plantune.errors import IllegalCandidate
from plantune.graph import Attrs, Step
from plantune.kernels.cuda.small_matrix import matrix
from plantune.kernels.hopper.design import Design
from plantune.kernels.hopper.family import HopperFamily, WarpgroupParts, why_not_reuse
from plantune.kernels.hopper.launch import Scalars
from plantune.kernels.hopper.tiles import Box
from plantune.kernels.legality import READ_OUTSIDE
from plantune.kernels.patterns.epilogue import ConvEpilogue, conv_epilogue
from plantune.kernels.patterns.squeeze_excite import SqueezeExcite, squeeze_excite_of
from plantune.kernels.weights.constants import Arrangement, Parameter, channel_values
from plantune.space import Arch

HIDDEN_MAX = 32  # rows of both layers in shared memory
TILE_NS = (64, 128)  # of 256 channels the sums leave no registers for the layers


class SeScalars(Scalars):
    """plantune::ConvSeScalars."""

    _fields_ = fields("weight1 weight2 bias1:one bias2:one", one=Parameter)


@dataclass(frozen=True)
class SeParts(WarpgroupParts):
    """A convolution, and the layers between it and the rest of its epilogue."""

    layers: SqueezeExcite


S = TypeVar("S", bound=SeParts)


class SeFamily(HopperFamily[S]):
    """A family whose blocks have all channels of whole images, for the layers after them."""

    def extra(self, parts: S, images: int) -> tuple[tuple[int, int], ...]:
        """Parts of shared memory beside the layers, as `Design` has them."""
        return ()

    def why_not_config(self, parts: S, config: Attrs, arch: Arch) -> str | None:
        shape, tile_m = parts.shape, int(config["tile_m"])
        if tile_m % (shape.p * shape.q):
            return f"{tile_m} pixels are not whole images of {shape.p}x{shape.q}"
        return super().why_not_config(parts, config, arch)

    def design(self, parts: S, config: Attrs) -> Design:
        shape, tile_m = parts.shape, int(config["tile_m"])
        images = max(1, tile_m // (shape.p * shape.q))
        layers = (16, layers_bytes(tile_m, images, shape.o, parts.layers))
        axes: dict[str, Any] = dict(config)
        return Design(
            shape,
            Box(shape.q, shape.p, images),
            **axes,
            tile_n=shape.o,
            split_k=1,
            reuse=why_not_reuse(shape, tile_m) is None,
            outputs=1 if parts.epilogue.unshifted is None else 2,
            extra=(layers, *self.extra(parts, images)),
        )


def layer_constants(parts: SeParts) -> dict[str, tuple[str | None, Arrangement]]:
    """Both layers by rows, and their biases, by the words of SeScalars."""
    types = parts.step.types
    found: dict[str, tuple[str | None, Arrangement]] = {}
    for number, layer in (("1", parts.layers.squeeze), ("2", parts.layers.excite)):
        type_ = types[layer.weight]
        found[f"weight{number}"] = (layer.weight, matrix(layer, type_))
        found[f"bias{number}"] = (layer.bias, channel_values(type_, layer.width))
    return found


def hidden_members(layers: SqueezeExcite) -> dict[str, Any]:
    """The kernel's template members apart from those of the convolution."""
    squeeze, excite = layers.squeeze, layers.excite
    sizes = {"kHidden": padded(squeeze.width), "kHiddenUsed": squeeze.width}
    return {**sizes, "kBias1": squeeze.bias is not None, "kBias2": excite.bias is not None}


def parts_of(step: Step) -> tuple[ConvEpilogue, SqueezeExcite]:
    """The convolution with all of its epilogue, and the layers between; raises IllegalCandidate."""
    ops = list(step.ops)
    if "mean" not in ops:
        raise IllegalCandidate("no squeeze-and-excite follows a convolution")
    first = ops.index("mean")
    head, tail = step.nodes[:first], step.nodes[first:]
    if not head:
        raise IllegalCandidate("the step starts with the mean, not with a convolution")
    layers = squeeze_excite_of(step, tail)
    left = [name for name, _ in step.outputs if name in {node.name for node in head}]
    if left or layers.means or layers.hidden or layers.gates or layers.result is None:
        raise IllegalCandidate(READ_OUTSIDE)
    if layers.image != head[-1].name:
        raise IllegalCandidate(f"the mean is not of {head[-1].name!r}, the value before it")
    epilogue = conv_epilogue(step.part(head, (head[-1].name,)))
    if epilogue.chain:
        raise IllegalCandidate("between convolution and mean there is more than scale and bias")
    if layers.offset is not None and layers.offset not in step.constants:
        raise IllegalCandidate(f"the offset {layers.offset!r} is not constant between calls")
    whole = replace(
        epilogue,
        residual=layers.residual,
        chain=layers.chain,
        offset=layers.offset,
        unshifted=layers.unshifted,
    )
    return whole, layers


def layers_bytes(tile_m: int, images: int, channels: int, layers: SqueezeExcite) -> int:
    """Shared memory for the layers, for each warp's sums, and for each image's mean and gates."""
    hidden = padded(layers.squeeze.width)
    floats = 2 * hidden * channels + hidden + channels
    floats += tile_m // 16 * channels + images * (hidden + 2 * channels)
    return -(-4 * floats // 16) * 16


def padded(hidden: int) -> int:
    """Rows of the layers, which are copied by 16 bytes."""
    return -(-hidden // 4) * 4
