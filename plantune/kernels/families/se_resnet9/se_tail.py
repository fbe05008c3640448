"""Squeeze-and-excite with its gate, residual and ReLU, in one pass over each image."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import ClassVar

import torch

from plantune.canonical import Attrs
from plantune.errors import IllegalCandidate
from plantune.graph.step import Step
from plantune.graph.types import TensorType
from plantune.kernels.constants import in_rows
from plantune.kernels.cuda_family import CudaFamily
from plantune.kernels.family import Binding, Frame, images
from plantune.kernels.patterns.squeeze_excite import SqueezeExcite, squeeze_excite_of
from plantune.kernels.small_matrix import TILE, SmallMatrix, shared_bytes_at_most, why_not_mma
from plantune.kernels.vector_kernel import ELEMENTS, VECTOR_BYTES, VectorKernel
from plantune.space.arch import Arch

SOURCE = """#include "cuda/se_resnet9/se_tail.h"
using Parts = plantune::SeTailParts<{parts}>;
using Tail = plantune::SeTail<{element}, {channels}, {hidden}, {pixels}, Parts, {images}, {threads},
                              plantune::{matrix}>;
extern "C" __global__ __launch_bounds__({threads}) void run(Tail::Arguments arguments) {{
  Tail::run<true>(arguments);
}}
extern "C" __global__ __launch_bounds__({threads}) void run_unaligned(Tail::Arguments arguments) {{
  Tail::run<false>(arguments);
}}
"""
HIDDEN_MAX = 256
UNIT = 4  # columns of a row that a lane reads at least
STATIC_SHARED_BYTES = 48 << 10


class SeTail(CudaFamily):
    """Config: `images` and `threads` of a block, each image having its share of the threads; the
    `math` of the two layers, "simt" in float or "mma" on tensor cores.
    """

    name: ClassVar = "se_tail"

    def why_not_step(self, step: Step) -> str | None:
        try:
            parts = squeeze_excite_of(step, step.nodes)
        except IllegalCandidate as reason:
            return str(reason)
        type_ = step.types[parts.image]
        if type_.dtype not in ELEMENTS:
            return f"the kernel is written for {', '.join(ELEMENTS)}, got {type_.dtype}"
        if type_.numel == 0 or type_.shape[1] % 8:
            return f"channels are read by eights, got shape {type_.shape}"
        if parts.squeeze.width > HIDDEN_MAX:
            return f"it takes up to {HIDDEN_MAX} hidden channels, got {parts.squeeze.width}"
        if len(parts.means) > 2 or len(parts.gates) > 2:
            return "more than two shapes of the means or gates are read outside"
        return None

    def why_not_config(self, step: Step, config: Attrs, arch: Arch) -> str | None:
        type_ = step.types[squeeze_excite_of(step, step.nodes).image]
        if config["images"] > type_.shape[0]:
            return f"a block of {config['images']} images is larger than the batch"
        team, vectors = config["threads"] // config["images"], type_.shape[1] // _vector(type_)
        if team < vectors:
            return f"{team} threads of an image do not cover the {vectors} vectors of its channels"
        if config["math"] == "mma" and (reason := why_not_mma(type_.dtype, config["images"], arch)):
            return reason
        shared = static_shared_bytes_at_most(step, config)
        if shared > STATIC_SHARED_BYTES:
            return f"it declares {shared} bytes of shared memory, {STATIC_SHARED_BYTES} may be"
        return None

    def layouts(self, step: Step, config: Attrs) -> Mapping[str, str]:
        return images(step, "nhwc")

    def threads(self, step: Step, config: Attrs) -> int:
        return int(config["threads"])

    def source(self, step: Step, config: Attrs, arch: Arch) -> str:
        parts = squeeze_excite_of(step, step.nodes)
        type_ = step.types[parts.image]
        _, channels, height, width = type_.shape
        return SOURCE.format(
            element=ELEMENTS[type_.dtype],
            channels=channels,
            hidden=parts.squeeze.width,
            pixels=height * width,
            parts=_parts(parts),
            images=config["images"],
            threads=config["threads"],
            matrix="SmallMatrixMma" if config["math"] == "mma" else "SmallMatrix",
        )

    def bind(self, step: Step, config: Attrs, frame: Frame) -> Binding:
        bound = _Bound(step, config, frame)
        return Binding(bound.launch, constants=bound.constants)


class _Arguments(ctypes.Structure):
    """plantune::SeTailArguments."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight1", "bias1", "weight2", "bias2")),
        *((name, ctypes.c_void_p) for name in ("residual", "offset", "y", "unshifted")),
        ("means", ctypes.c_void_p * 2),
        ("hidden", ctypes.c_void_p),
        ("gates", ctypes.c_void_p * 2),
        ("images", ctypes.c_longlong),
    )


class _Bound:
    """The kernels, the packed weights, and what to give them."""

    def __init__(self, step: Step, config: Attrs, frame: Frame) -> None:
        self.parts = squeeze_excite_of(step, step.nodes)
        self.values = frame.values
        type_ = step.types[self.parts.image]
        self.count, channels = type_.shape[:2]
        self.kernel = VectorKernel(frame.built, int(config["threads"]))
        self.grid = (-(-self.count // int(config["images"])), 1, 1)
        like = torch.empty(0, dtype=type_.torch_dtype, device=frame.device)
        hidden, unit = self.parts.squeeze.width, TILE if config["math"] == "mma" else UNIT
        squeeze = SmallMatrix(hidden, channels, unit)
        excite = SmallMatrix(channels, hidden, unit)
        self.weight1 = squeeze.constant(frame.values, self.parts.squeeze, like)
        self.weight2 = excite.constant(frame.values, self.parts.excite, like)
        names = (self.parts.squeeze.bias, self.parts.excite.bias, self.parts.offset)
        self._vectors = {
            name: in_rows(step, name, frame) for name in names if name in step.constants
        }
        self.constants = (self.weight1, self.weight2, *self._vectors.values())

    def launch(self, stream: int) -> None:
        names = (self.parts.image, self.parts.residual)
        read = [self.values[name] for name in names if name is not None]
        self.kernel.launch(stream, self.grid, [self._arguments()], read)

    def _arguments(self) -> _Arguments:
        parts = self.parts
        return _Arguments(
            x=self._address(parts.image),
            weight1=self.weight1.tensor.data_ptr(),
            bias1=self._address(parts.squeeze.bias),
            weight2=self.weight2.tensor.data_ptr(),
            bias2=self._address(parts.excite.bias),
            residual=self._address(parts.residual),
            offset=self._address(parts.offset),
            y=self._address(parts.result),
            unshifted=self._address(parts.unshifted),
            means=self._pair(parts.means),
            hidden=self._address(parts.hidden),
            gates=self._pair(parts.gates),
            images=self.count,
        )

    def _address(self, name: str | None) -> int | None:
        if name is None:
            return None
        found = self._vectors[name].tensor if name in self._vectors else self.values[name]
        return found.data_ptr()

    def _pair(self, names: tuple[str, ...]) -> ctypes.Array[ctypes.c_void_p]:
        return (ctypes.c_void_p * 2)(*map(self._address, names))


def _parts(parts: SqueezeExcite) -> str:
    """The flags of plantune::SeTailParts."""
    flags = (
        parts.result is not None,
        parts.residual is not None,
        parts.relu,
        parts.unshifted is not None,
        bool(parts.means or parts.hidden or parts.gates),
    )
    return ", ".join(str(flag).lower() for flag in flags)


def _vector(type_: TensorType) -> int:
    """Elements of one vector."""
    return VECTOR_BYTES // type_.torch_dtype.itemsize


def _groups(type_: TensorType, config: Attrs) -> int:
    """Pixels of an image that its threads take at once."""
    _, channels, height, width = type_.shape
    team = int(config["threads"]) // int(config["images"])
    return int(min(team // (channels // _vector(type_)), height * width))


def static_shared_bytes_at_most(step: Step, config: Attrs) -> int:
    """What plantune::SeTail declares: the sums of each group of pixels, and for both layers."""
    parts = squeeze_excite_of(step, step.nodes)
    type_ = step.types[parts.image]
    channels, hidden = type_.shape[1], parts.squeeze.width
    images, threads = int(config["images"]), int(config["threads"])
    # Rows are padded so that threads that read several at once meet other banks.
    sums = images * _groups(type_, config) * (channels + 16) * 4
    squeeze = shared_bytes_at_most(hidden, channels, images, threads)
    return sums + squeeze + shared_bytes_at_most(channels, hidden, images, threads)


FAMILY = SeTail()
