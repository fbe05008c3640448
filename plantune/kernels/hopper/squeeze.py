"""Squeeze-and-excite behind a convolution, as the Hopper kernels have it in shared memory."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any, ClassVar

import torch

from plantune.errors import IllegalCandidate
from plantune.graph.step import Step
from plantune.kernels.family import Frame
from plantune.kernels.hopper.prepared import Prepared, Scalars
from plantune.kernels.patterns.epilogue import ConvEpilogue, conv_epilogue
from plantune.kernels.patterns.squeeze_excite import Layer, SqueezeExcite, squeeze_excite_of

HIDDEN = "  static constexpr int kHidden = {};\n"
LAYERS_US = 2.2  # more than the convolution alone, in its first version (H200, 2026-11-20)
HIDDEN_MAX = 32  # rows of both layers in shared memory
TILE_NS = (64, 128)  # of 256 channels the sums leave no registers for the layers


class SeScalars(Scalars):
    """plantune::ConvSeScalars."""

    _fields_: ClassVar[Any] = (("layers", ctypes.c_void_p),)


class PreparedSe(Prepared):
    """The layers in float beside the convolution's weight: by rows, by columns, two biases."""

    def __init__(
        self, step: Step, epilogue: ConvEpilogue, layers: SqueezeExcite, frame: Frame
    ) -> None:
        super().__init__(step, epilogue, frame)
        self._read = layers
        channels, hidden = self.weight.shape[0], padded(layers.squeeze.width)
        sizes = (hidden * channels, hidden * channels, hidden, channels)
        # What stands behind the hidden columns stays zero.
        self.layers = torch.zeros(sum(sizes), device=frame.device)
        self._weights = self.layers[: 2 * sizes[0]].view(2, hidden, channels)
        self._biases = self.layers[2 * sizes[0] :].split(sizes[2:])

    def refresh(self) -> None:
        super().refresh()
        squeeze, excite = self._read.squeeze, self._read.excite
        hidden = squeeze.width
        self._weights[0, :hidden].copy_(self._by_rows(squeeze))
        self._weights[1, :hidden].copy_(self._by_rows(excite).t())
        if squeeze.bias is not None:
            self._biases[0][:hidden].copy_(self._values[squeeze.bias])
        if excite.bias is not None:
            self._biases[1].copy_(self._values[excite.bias])

    def _by_rows(self, layer: Layer) -> torch.Tensor:
        weight = self._values[layer.weight]
        return weight if layer.by_rows else weight.t()

    def named(self) -> dict[str, int]:
        return {**self.addresses(), "layers": self.layers.data_ptr()}

    def scalars(self) -> SeScalars:
        return SeScalars(**self.named())


def parts_of(step: Step) -> tuple[ConvEpilogue, SqueezeExcite]:
    """The convolution with all of its epilogue, and the layers between; raises IllegalCandidate."""
    ops = list(step.ops)
    if "mean" not in ops:
        raise IllegalCandidate("there is no squeeze-and-excite behind a convolution")
    first = ops.index("mean")
    head, tail = step.nodes[:first], step.nodes[first:]
    if not head:
        raise IllegalCandidate("the step starts with the mean, not with a convolution")
    layers = squeeze_excite_of(step, tail)
    left = [name for name, _ in step.outputs if name in {node.name for node in head}]
    if left or layers.means or layers.hidden or layers.gates or layers.result is None:
        raise IllegalCandidate("a value before the end of the step is read outside of it")
    if layers.image != head[-1].name:
        raise IllegalCandidate(f"the mean is not of {head[-1].name!r}, the value before it")
    epilogue = conv_epilogue(beginning(step, len(head)))
    if epilogue.residual is not None or epilogue.relu:
        raise IllegalCandidate("between convolution and mean there is more than scale and bias")
    if layers.offset is not None and layers.offset not in step.constants:
        raise IllegalCandidate(f"the offset {layers.offset!r} is not constant between calls")
    whole = replace(
        epilogue,
        residual=layers.residual,
        relu=layers.relu,
        offset=layers.offset,
        unshifted=layers.unshifted,
    )
    return whole, layers


def beginning(step: Step, count: int) -> Step:
    """The first nodes of a step, as a step that makes the value of the last of them."""
    nodes = step.nodes[:count]
    read = {value for node in nodes for value in node.inputs}
    inputs = tuple((name, type_) for name, type_ in step.inputs if name in read)
    last = nodes[-1].name
    constants = step.constants & {name for name, _ in inputs}
    return Step(nodes, inputs, ((last, step.types[last]),), constants, step.phase)


def layers_bytes(tile_m: int, images: int, channels: int, layers: SqueezeExcite) -> int:
    """Of the layers; of sums of each warp; of what is hidden, means and gates of each image."""
    hidden = padded(layers.squeeze.width)
    floats = 2 * hidden * channels + hidden + channels
    floats += tile_m // 16 * channels + images * (hidden + 2 * channels)
    return -(-4 * floats // 16) * 16


def padded(hidden: int) -> int:
    """Rows of the layers, which are copied by 16 bytes."""
    return -(-hidden // 4) * 4
