"""Squeeze-and-excite with what follows its gates, on a CPU in one pass over the image.

The framework runs ten small ops for it, each some 30 us in a network whatever it computes; inductor
fuses them after 4 s of compiling for every size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from plantune.devices.cuda.structs import fields
from plantune.graph import Step, TensorType
from plantune.graph.layouts import view_bytes
from plantune.kernels.cpu.cxx import UnitFamily, function
from plantune.kernels.family import Arch, Attrs, Binding, Frame, Values, refuse
from plantune.kernels.patterns.expression import defined_function, functions_in
from plantune.kernels.patterns.squeeze_excite import SqueezeExcite, TailParts, squeeze_excite_of


class Sizes(ctypes.Structure):
    """The struct of that name in `csrc/cpu/squeeze_excite.cpp`."""

    _fields_ = fields("count:int pixels:int channels:int hidden:int nhwc:int")


class SqueezeExciteTail(UnitFamily[TailParts]):
    """Config: `layout` of images."""

    name: ClassVar = "squeeze_excite"
    unit: ClassVar = name
    build_s: ClassVar = 1.0

    def defined(self, parts: TailParts) -> str:
        return defined_function(parts.tail.chain)

    def read(self, step: Step) -> TailParts:
        parts = TailParts(step, squeeze_excite_of(step, step.nodes))
        refuse(
            {
                "it is written for float32": {t.dtype for t in step.types.values()} != {"float32"},
                "there are no images": parts.image.numel == 0,
                **_leaving(parts.tail),
            }
        )
        return parts

    def workspace_bytes(self, parts: TailParts, config: Attrs) -> int:
        return _scratch_type(parts).size_bytes

    def build(self, parts: TailParts, config: Attrs, arch: Arch) -> Callable[..., None]:
        address, ends = ctypes.c_void_p, (ctypes.c_int, ctypes.c_float)
        arguments = [ctypes.POINTER(Sizes), *[address] * 6, *ends, address, address]
        made: Callable[..., None] = function(self.library(parts), self.unit, arguments)
        return made

    def bind(self, parts: TailParts, config: Attrs, frame: Frame) -> Binding:
        read, values, run = parts.tail, frame.values, frame.built
        assert frame.workspace is not None
        assert read.result is not None
        scratch = view_bytes(frame.workspace, 0, _scratch_type(parts), "nchw")
        y, sizes = values[read.result], _sizes(parts, config)
        applies, prepared = bool(functions_in(read.chain)), list[Any]()

        def refresh() -> None:
            prepared[:] = _prepared(read, values)

        def launch(stream: int) -> None:
            *weights, offset = prepared
            x = values[read.image].data_ptr()
            residual = _address(values[read.residual]) if read.residual else None
            ends = y.data_ptr(), scratch.data_ptr()
            run(sizes, x, *map(_address, weights), residual, applies, offset, *ends)

        return Binding(launch, refresh)


def _leaving(read: SqueezeExcite) -> dict[str, bool]:
    """Only the result leaves the kernel."""
    inner = (*read.means, read.hidden, *read.gates, read.unshifted)
    outside = (name for name in inner if name is not None)
    return {
        "the gates are the end of the step": read.result is None,
        **{f"{name!r} stays inside, but is read outside": True for name in outside},
    }


def _sizes(parts: TailParts, config: Attrs) -> Sizes:
    count, channels, height, width = parts.image.shape
    hidden, nhwc = parts.tail.squeeze.width, config["layout"] == "nhwc"
    return Sizes(count, height * width, channels, hidden, nhwc)


def _scratch_type(parts: TailParts) -> TensorType:
    count, channels, *_ = parts.image.shape
    return TensorType((count, channels + parts.tail.squeeze.width))


def _prepared(read: SqueezeExcite, values: Values) -> list[Any]:
    """Both layers as the kernel reads them, and the offset."""
    squeeze, excite = read.squeeze, read.excite
    return [
        squeeze.rows(values[squeeze.weight]).contiguous(),
        None if squeeze.bias is None else values[squeeze.bias],
        excite.rows(values[excite.weight]).t().contiguous(),
        None if excite.bias is None else values[excite.bias],
        0.0 if read.offset is None else values[read.offset].item(),
    ]


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


FAMILY = SqueezeExciteTail()
