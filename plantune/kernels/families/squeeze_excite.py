"""Squeeze-and-excite with what follows its gates, on a CPU in one pass over the image.

The framework runs ten small ops for it, each some 30 us in a network whatever it computes; inductor
fuses them after 4 s of compiling for every size.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from plantune.canonical import Attrs
from plantune.errors import IllegalCandidate
from plantune.graph.step import Step
from plantune.graph.types import TensorType
from plantune.kernels.cxx import carried_library, function, load_unit, unit_source, why_not_loadable
from plantune.kernels.family import Binding, Frame, KernelFamily, Values, images
from plantune.kernels.patterns.squeeze_excite import SqueezeExcite, squeeze_excite_of
from plantune.layouts import view_bytes
from plantune.space.arch import Arch

# The unit of csrc/cpu, for images of all sizes.
UNIT = "squeeze_excite"


class Sizes(ctypes.Structure):
    """The struct of that name in `csrc/cpu/squeeze_excite.cpp`."""

    _fields_: ClassVar = [
        (name, ctypes.c_int) for name in ("count", "pixels", "channels", "hidden", "nhwc")
    ]


class SqueezeExciteTail(KernelFamily):
    """Config: `layout` of images."""

    name: ClassVar = "squeeze_excite"
    arch_kinds = frozenset(("cpu",))
    build_s = 2.0

    def why_not_arch(self, arch: Arch) -> str | None:
        return why_not_loadable(UNIT) or super().why_not_arch(arch)

    def why_not_step(self, step: Step) -> str | None:
        try:
            read = squeeze_excite_of(step, step.nodes)
        except IllegalCandidate as reason:
            return str(reason)
        types = [*step.types.values()]
        if any(type_.dtype != "float32" for type_ in types):
            return "it is written for float32"
        if step.types[read.image].numel == 0:
            return "there are no images"
        return _why_not_ends(read)

    def layouts(self, step: Step, config: Attrs) -> Mapping[str, str]:
        return images(step, config["layout"])

    def workspace_bytes(self, step: Step, config: Attrs) -> int:
        return _scratch_type(step, squeeze_excite_of(step, step.nodes)).size_bytes

    def source(self, step: Step, config: Attrs, arch: Arch) -> str | None:
        return None if carried_library(UNIT) else unit_source(UNIT)

    def build(self, step: Step, config: Attrs, arch: Arch) -> Callable[..., None]:
        address, value = ctypes.c_void_p, ctypes.c_float
        arguments = [ctypes.POINTER(Sizes), *[address] * 6, value, value, address, address]
        made: Callable[..., None] = function(load_unit(UNIT), UNIT, arguments)
        return made

    def bind(self, step: Step, config: Attrs, frame: Frame) -> Binding:
        read, values, run = squeeze_excite_of(step, step.nodes), frame.values, frame.built
        assert frame.workspace is not None
        assert read.result is not None
        scratch = view_bytes(frame.workspace, 0, _scratch_type(step, read), "nchw")
        y, sizes = values[read.result], _sizes(step, read, config)
        prepared: list[Any] = []

        def refresh() -> None:
            prepared[:] = _prepared(read, values)

        def launch(stream: int) -> None:
            *weights, least, offset = prepared
            x = values[read.image].data_ptr()
            residual = _address(values[read.residual]) if read.residual else None
            ends = y.data_ptr(), scratch.data_ptr()
            run(sizes, x, *map(_address, weights), residual, least, offset, *ends)

        return Binding(launch, refresh)


def _why_not_ends(read: SqueezeExcite) -> str | None:
    """Only the result leaves the kernel."""
    if read.result is None:
        return "the gates are the end of the step"
    inner = [*read.means, read.hidden, *read.gates, read.unshifted]
    outside = next((name for name in inner if name is not None), None)
    return None if outside is None else f"{outside!r} stays inside, but is read outside"


def _sizes(step: Step, read: SqueezeExcite, config: Attrs) -> Sizes:
    count, channels, height, width = step.types[read.image].shape
    hidden, nhwc = read.squeeze.width, config["layout"] == "nhwc"
    return Sizes(count, height * width, channels, hidden, nhwc)


def _scratch_type(step: Step, read: SqueezeExcite) -> TensorType:
    count, channels, *_ = step.types[read.image].shape
    return TensorType((count, channels + read.squeeze.width))


def _prepared(read: SqueezeExcite, values: Values) -> list[Any]:
    """Both layers as the kernel reads them, the least value and the offset."""
    squeeze, excite = read.squeeze, read.excite
    return [
        squeeze.rows(values[squeeze.weight]).contiguous(),
        None if squeeze.bias is None else values[squeeze.bias],
        excite.columns(values[excite.weight]).contiguous(),
        None if excite.bias is None else values[excite.bias],
        0.0 if read.relu else -math.inf,
        0.0 if read.offset is None else values[read.offset].item(),
    ]


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


FAMILY = SqueezeExciteTail()
