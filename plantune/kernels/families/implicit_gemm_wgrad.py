"""Gradients of weights as implicit GEMMs on CUTLASS 2.x main loops, for every CUDA arch:
`csrc/cuda/implicit_gemm_wgrad.h`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from plantune.errors import IllegalCandidate
from plantune.graph import Node, Step
from plantune.kernels.cuda_family import Arch, Attrs, Binding, CudaFamily, Frame, Parts, refuse
from plantune.kernels.cutlass.gemm import (
    INDEX_MAX,
    Gemm,
    counters_of,
    estimate_us,
    partial_bytes,
    why_not_split,
    why_not_tile,
)
from plantune.kernels.cutlass.launch import COUNTER_BYTES, SPLIT_MODES, ConvOperands, ConvProblem
from plantune.kernels.cutlass.main_loop import ELEMENTS, MainLoop
from plantune.kernels.families.implicit_gemm_conv import (
    ACCESS_MIN,
    FILTER_MAX,
    ImplicitGemmConv,
    launching_tiles,
    possible_configs,
    why_not_tf32,
)
from plantune.kernels.hopper.launch import beyond_copies, placing_images, room_for
from plantune.space.search_space import SearchSpace

SOURCE = """#include "cuda/implicit_gemm_wgrad.h"
using namespace cutlass;
using Conv = plantune::ImplicitGemmWgrad<
    {arguments}, conv::IteratorAlgorithm::kOptimized,
    plantune::Value, {access}>;
static_assert(sizeof(Conv::SharedStorage) == {shared_bytes}, "A launch asks for other memory.");
static_assert(Conv::kThreads == {threads}, "A launch has other threads.");
PLANTUNE_IMPLICIT_GEMM(Conv)
"""


# With 128, main loops of sm70, sm86 and sm120 spilled: what finds pixels and taps takes the rest.
SUMS_MAX = 64


@dataclass(frozen=True)
class WeightParts(Parts):
    """The gradient of a convolution's weight, as a product of matrices: output channels by taps of
    channels, as deep as there are pixels.
    """

    @property
    def node(self) -> Node:
        return self.step.nodes[0]

    @property
    def gemm(self) -> Gemm:
        dy, x = (self.step.types[name] for name in self.node.inputs)
        o, c, r, s = self.node.types[0].shape
        pixels = dy.shape[0] * dy.shape[2] * dy.shape[3]
        elements = (math.prod(x.shape[1:]), math.prod(dy.shape[1:]))
        return Gemm(dy.dtype, o, c * r * s, pixels, (1, 1), elements)

    def access(self, config: Attrs) -> int:
        """Channels that are moved at once."""
        o, c, _, _ = self.node.types[0].shape
        return math.gcd(MainLoop.of(config, self.gemm.dtype).vector, o, c)

    def loop(self, config: Attrs) -> MainLoop:
        return MainLoop.of(config, self.gemm.dtype, self.access(config))


class ImplicitGemmWgrad(CudaFamily[WeightParts]):
    """Config: that of `implicit_gemm_conv`; `split_k` blocks share the pixels of a tile."""

    name: ClassVar = "implicit_gemm_wgrad"
    image_layout = "nhwc"
    build_s = 2.5

    def configs(self, space: SearchSpace) -> tuple[Attrs, ...]:
        return possible_configs(space, self.name)

    def read(self, step: Step) -> WeightParts:
        parts, node = WeightParts(step), step.nodes[0]
        if step.ops != ("conv2d_wgrad",):
            raise IllegalCandidate("only the gradient of a convolution's weight alone")
        gemm, attrs = parts.gemm, node.attrs
        o, c, *kernel = node.types[0].shape
        padding: Any = attrs["padding"]
        large = max(gemm.m, gemm.n, gemm.channels, *gemm.image_elements) > INDEX_MAX
        refuse(
            {
                "only convolutions without groups": attrs["groups"] != 1,
                f"CUTLASS multiplies {', '.join(ELEMENTS)}, not {gemm.dtype}": gemm.dtype
                not in ELEMENTS,
                "there is nothing to compute": 0 in (gemm.m, gemm.n, gemm.channels),
                f"{c} channels in and {o} out; both must be even": c % ACCESS_MIN or o % ACCESS_MIN,
                f"a filter of up to {FILTER_MAX} rows and columns, got {kernel}": max(kernel)
                > FILTER_MAX,
                # There a NaN of a pixel whose taps read nothing would reach the sums.
                f"the padding {padding} is not smaller than the kernel {kernel}": any(
                    pad >= size for pad, size in zip(padding, kernel, strict=True)
                ),
                "its pixels, or the elements of an image, do not fit into 32 bits": large,
                "an image is constant": step.constants,
            }
        )
        return parts

    def why_not_config(self, parts: WeightParts, config: Attrs, arch: Arch) -> str | None:
        gemm, loop = parts.gemm, parts.loop(config)
        sums = loop.sums
        return (
            loop.why_not(arch)
            or (f"{sums} sums of a thread are spilled" if sums > SUMS_MAX else None)
            or why_not_tf32(loop)
            or why_not_tile(gemm, loop)
            or why_not_split(gemm, config)
        )

    def threads(self, parts: WeightParts, config: Attrs) -> int:
        return parts.loop(config).threads

    def shared_bytes(self, parts: WeightParts, config: Attrs, arch: Arch) -> int:
        return parts.loop(config).shared_bytes(arch)

    def workspace_bytes(self, parts: WeightParts, config: Attrs) -> int:
        gemm, rooms = parts.gemm, room_for(parts.step, parts.node.inputs)
        return rooms + partial_bytes(gemm, config) + counters_of(gemm, config) * COUNTER_BYTES

    def copied(self, parts: WeightParts) -> frozenset[str]:
        return frozenset(parts.node.inputs)

    def source(self, parts: WeightParts, config: Attrs, arch: Arch) -> str:
        loop = parts.loop(config)
        return SOURCE.format(
            arguments=loop.arguments(arch),
            shared_bytes=loop.shared_bytes(arch),
            threads=loop.threads,
            access=parts.access(config),
        )

    def bind(self, parts: WeightParts, config: Attrs, frame: Frame) -> Binding:
        gemm, names = parts.gemm, parts.node.inputs
        place = placing_images(parts.step, names, frame)
        with torch.cuda.device(frame.device):
            run_tiles = launching_tiles(
                config, frame, _problem(parts, config), counters_of(gemm, config)
            )
        ones, zeros = (torch.full((gemm.n,), v, device=frame.device) for v in (1.0, 0.0))
        work: dict[str, int] = {}
        if config["split_k"] > 1:
            first = beyond_copies(parts.step, names, frame)
            work = {"partial": first, "counters": first + partial_bytes(gemm, config)}

        def launch(stream: int) -> None:
            dy, x, _ = place(stream)
            operands = ConvOperands(
                x=dy.data_ptr(),
                w=x.data_ptr(),
                y=frame.values[parts.node.name].data_ptr(),
                scale=ones.data_ptr(),
                bias=zeros.data_ptr(),
                **work,
            )
            run_tiles(stream, operands)

        return Binding(launch)

    def estimate_us(self, parts: WeightParts, config: Attrs, arch: Arch) -> float:
        return estimate_us(parts.step, parts.gemm, config, arch, ImplicitGemmConv.name)


def _problem(parts: WeightParts, config: Attrs) -> ConvProblem:
    attrs: Any = parts.node.attrs
    dy, x = (parts.step.types[name].shape for name in parts.node.inputs)
    o, c, r, s = parts.node.types[0].shape
    return ConvProblem(
        *(x[0], x[2], x[3], c, o, r, s, dy[2], dy[3]),
        *(*attrs["padding"], *attrs["stride"], *attrs["dilation"]),
        *(config["split_k"], SPLIT_MODES[config["split_mode"]], 0),
    )


FAMILY = ImplicitGemmWgrad()
