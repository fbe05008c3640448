"""Squeeze-and-excite with what follows its gates, on a CPU in one pass over the image.

The framework runs ten small ops for it, each some 30 us in a network whatever it computes; inductor
fuses them after 4 s of compiling for every size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from plantune.canonical import Attrs
from plantune.graph.step import Step
from plantune.graph.types import TensorType
from plantune.kernels.cxx import (
    carried_library,
    function,
    load_unit,
    unit_source,
    why_not_loadable,
)
from plantune.kernels.family import Binding, Frame, KernelFamily, Values
from plantune.kernels.legality import refuse
from plantune.kernels.patterns.expression import defined_function, functions_in
from plantune.kernels.patterns.squeeze_excite import SqueezeExcite, TailParts, squeeze_excite_of
from plantune.layouts import view_bytes
from plantune.space.arch import Arch

# The unit of csrc/cpu, for images of all sizes.
UNIT = "squeeze_excite"


class Sizes(ctypes.Structure):
    """The struct of that name in `csrc/cpu/squeeze_excite.cpp`."""

    _fields_: ClassVar = [
        (name, ctypes.c_int) for name in ("count", "pixels", "channels", "hidden", "nhwc")
    ]


class SqueezeExciteTail(KernelFamily[TailParts]):
    """Config: `layout` of images."""

    name: ClassVar = "squeeze_excite"
    arch_kinds = frozenset(("cpu",))
    build_s = 2.0

    def why_not_arch(self, arch: Arch) -> str | None:
        return why_not_loadable(UNIT) or super().why_not_arch(arch)

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

    def why_not_config(self, parts: TailParts, config: Attrs, arch: Arch) -> str | None:
        return why_not_loadable(UNIT, _defined(parts)) or super().why_not_config(
            parts, config, arch
        )

    def workspace_bytes(self, parts: TailParts, config: Attrs) -> int:
        return _scratch_type(parts).size_bytes

    def source(self, parts: TailParts, config: Attrs, arch: Arch) -> str | None:
        defined = _defined(parts)
        return None if carried_library(UNIT, defined) else unit_source(UNIT, defined)

    def build(self, parts: TailParts, config: Attrs, arch: Arch) -> Callable[..., None]:
        address, ends = ctypes.c_void_p, (ctypes.c_int, ctypes.c_float)
        arguments = [ctypes.POINTER(Sizes), *[address] * 6, *ends, address, address]
        library = load_unit(UNIT, _defined(parts))
        made: Callable[..., None] = function(library, UNIT, arguments)
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


def _defined(parts: TailParts) -> str:
    return defined_function(parts.tail.chain)


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
