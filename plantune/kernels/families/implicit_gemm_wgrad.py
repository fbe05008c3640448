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
from plantune.kernels.cuda import vector_kernel
from plantune.kernels.cuda.cuda_family import Arch, Attrs, Binding, Frame, refuse
from plantune.kernels.cutlass import family as cutlass
from plantune.kernels.cutlass.gemm import Gemm, counters_of, why_not_split, why_not_tile
from plantune.kernels.cutlass.launch import ConvOperands
from plantune.kernels.hopper.launch import beyond_copies, placing_images, room_for
from plantune.kernels.legality import not_within
from plantune.kernels.patterns.epilogue import not_factors

# With 128, main loops of sm70, sm86 and sm120 spilled: what finds pixels and taps takes the rest.
SUMS_MAX = 64


@dataclass(frozen=True)
class WeightParts(cutlass.ProductParts):
    """The gradient of a convolution's weight, as a product of matrices: output channels by taps of
    channels, as deep as there are pixels.
    """

    @property
    def node(self) -> Node:
        return self.step.nodes[0]


class ImplicitGemmWgrad(cutlass.ProductFamily[WeightParts]):
    """Config: see `ProductFamily`; the depth is the pixels."""

    name: ClassVar = "implicit_gemm_wgrad"
    kernel = ("implicit_gemm_wgrad", "ImplicitGemmWgrad", "PLANTUNE_IMPLICIT_GEMM")

    def read(self, step: Step) -> WeightParts:
        if step.ops != ("conv2d_wgrad",):
            raise IllegalCandidate("only the gradient of a convolution's weight alone")
        node = step.nodes[0]
        attrs, (o, c, *kernel) = node.attrs, node.types[0].shape
        dy, x = (step.types[name] for name in node.inputs)
        pixels = dy.shape[0] * dy.shape[2] * dy.shape[3]
        elements = (math.prod(x.shape[1:]), math.prod(dy.shape[1:]))
        gemm = Gemm(node.types[0].dtype, o, c * math.prod(kernel), pixels, (1, 1), elements)
        padding: Any = attrs["padding"]
        refuse(
            {
                **cutlass.not_a_product(gemm, attrs["groups"], gemm.m, gemm.n, gemm.channels),
                f"{c} channels in and {o} out; both must be even": c % cutlass.ACCESS_MIN
                or o % cutlass.ACCESS_MIN,
                f"a filter of up to {cutlass.FILTER_MAX} rows and columns, got {kernel}": max(
                    kernel
                )
                > cutlass.FILTER_MAX,
                # There a NaN of a pixel whose taps read nothing would reach the sums.
                **not_within(padding, kernel),
                **not_factors(step, node),
                **vector_kernel.not_an_element(step.types[node.name].dtype),
                "an image is constant": step.constants,
            }
        )
        return WeightParts(step, gemm, (o, c))

    def why_not_config(self, parts: WeightParts, config: Attrs, arch: Arch) -> str | None:
        gemm, loop = parts.gemm, parts.loop(config)
        sums = loop.sums
        return (
            loop.why_not(arch)
            or (f"{sums} sums of a thread are spilled" if sums > SUMS_MAX else None)
            or cutlass.why_not_tf32(parts.step, loop)
            or why_not_tile(gemm, loop)
            or why_not_split(gemm, config)
        )

    def workspace_bytes(self, parts: WeightParts, config: Attrs) -> int:
        rooms = room_for(parts.step, parts.node.inputs)
        return rooms + super().workspace_bytes(parts, config)

    def copied(self, parts: WeightParts) -> frozenset[str]:
        return frozenset(parts.node.inputs)

    def bind(self, parts: WeightParts, config: Attrs, frame: Frame) -> Binding:
        gemm, (dy, x) = parts.gemm, parts.node.inputs
        place = placing_images(parts.step, (dy, x), frame)
        shapes = parts.step.types[x].shape, parts.node.types[0].shape, parts.step.types[dy].shape
        problem = cutlass.problem_of(shapes, parts.node.attrs, config)
        with torch.cuda.device(frame.device):
            run_tiles = cutlass.launching_tiles(config, frame, problem, counters_of(gemm, config))
        ones, zeros = (torch.full((gemm.n,), v, device=frame.device) for v in (1.0, 0.0))
        work = cutlass.parts_at(gemm, config, beyond_copies(parts.step, (dy, x), frame))

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
        """Both operands are found pixel by pixel."""
        return arch.cost(self.name)["finding"] * super().estimate_us(parts, config, arch)


FAMILY = ImplicitGemmWgrad()
