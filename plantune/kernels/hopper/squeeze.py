"""Squeeze-and-excite after a convolution, as the Hopper kernels have it in shared memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from plantune.devices.cuda.structs import fields
from plantune.errors import IllegalCandidate
from plantune.graph import Step
from plantune.kernels.cuda.small_matrix import matrix
from plantune.kernels.hopper.launch import Scalars
from plantune.kernels.legality import READ_OUTSIDE
from plantune.kernels.patterns.epilogue import ConvEpilogue, conv_epilogue
from plantune.kernels.patterns.squeeze_excite import SqueezeExcite, squeeze_excite_of
from plantune.kernels.weights.constants import Arrangement, Parameter, channel_values

HIDDEN_MAX = 32  # rows of both layers in shared memory
TILE_NS = (64, 128)  # of 256 channels the sums leave no registers for the layers


class GateScalars(Scalars):
    """plantune::GateScalars."""

    _fields_ = fields("weight1 weight2 bias1:one bias2:one", one=Parameter)


def layer_constants(step: Step, layers: SqueezeExcite) -> dict[str, tuple[str | None, Arrangement]]:
    """Both layers by rows, and their biases, by the words of GateScalars."""
    found: dict[str, tuple[str | None, Arrangement]] = {}
    for number, layer in (("1", layers.squeeze), ("2", layers.excite)):
        type_ = step.types[layer.weight]
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
