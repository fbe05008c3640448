"""Chains of pointwise ops as one expression, in one pass over memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar

from plantune.canonical import Attrs
from plantune.errors import IllegalCandidate
from plantune.graph.step import Step
from plantune.kernels.constants import in_rows
from plantune.kernels.cuda_family import CudaFamily
from plantune.kernels.family import Binding, Frame, images
from plantune.kernels.patterns.pointwise_chain import (
    Expression,
    Geometry,
    expression_of,
    geometry_of,
)
from plantune.kernels.vector_kernel import ELEMENTS, VECTOR_BYTES, VectorKernel, members
from plantune.space.arch import Arch

INPUTS_MAX, OUTPUTS_MAX = 8, 4
SOURCE = """#include "cuda/pointwise.h"
struct Chain {{
  using T = {element};
  using Index = {index};
  static constexpr int kInputs = {inputs}, kOutputs = {outputs}, kAxes = {axes};
  static constexpr int kWidth = {width}, kVectors = {vectors}, kThreads = {threads};
  static constexpr Index kSizes[] = {{{sizes}}};
  static constexpr Index kStrides[][kAxes] = {{{strides}}};
  static __device__ __forceinline__ void evaluate(const float (&in)[kInputs],
                                                  float (&out)[kOutputs]) {{
    {lines}
  }}
}};
using Kernel = plantune::Pointwise<Chain>;
extern "C" __global__ __launch_bounds__({threads}) void run(Kernel::Arguments arguments) {{
  Kernel::run<true>(arguments);
}}
extern "C" __global__ __launch_bounds__({threads}) void run_unaligned(
    Kernel::Arguments arguments) {{
  Kernel::run<false>(arguments);
}}
"""


class Pointwise(CudaFamily):
    """Config: `layout` of images; a thread of a block takes so many `vectors`."""

    name: ClassVar = "pointwise"

    def why_not_step(self, step: Step) -> str | None:
        try:
            expression = expression_of(step)
        except IllegalCandidate as reason:
            return str(reason)
        dtypes = {type_.dtype for _, type_ in (*step.inputs, *step.outputs)}
        if len(dtypes) > 1 or not dtypes <= set(ELEMENTS):
            return f"the kernel is written for {', '.join(ELEMENTS)}, got {', '.join(dtypes)}"
        if step.outputs[-1][1].numel == 0:
            return "there is nothing to compute"
        inputs, outputs = len(expression.operands), len(expression.results)
        if inputs > INPUTS_MAX or outputs > OUTPUTS_MAX:
            return f"it takes {INPUTS_MAX} inputs and {OUTPUTS_MAX} outputs at most"
        return None

    def why_not_config(self, step: Step, config: Attrs, arch: Arch) -> str | None:
        if config["layout"] == "nhwc" and len(step.outputs[-1][1].shape) != 4:
            return "tensors that are not images have the layout nchw"
        if config["layout"] == "nhwc" and step.phase == "refresh":
            return "weights are in nchw"
        return super().why_not_config(step, config, arch)

    def layouts(self, step: Step, config: Attrs) -> Mapping[str, str]:
        return images(step, config["layout"])

    def threads(self, step: Step, config: Attrs) -> int:
        return int(config["threads"])

    def source(self, step: Step, config: Attrs, arch: Arch) -> str:
        type_, chain = step.outputs[-1][1], _Chain(step, config)
        expression, geometry = chain.expression, chain.geometry
        made = [f"out[{i}] = {name};" for i, name in enumerate(expression.results)]
        return SOURCE.format(
            element=ELEMENTS[type_.dtype],
            index="unsigned" if type_.numel < 1 << 31 else "unsigned long long",
            inputs=len(expression.operands),
            outputs=len(expression.results),
            axes=len(geometry.sizes),
            width=geometry.width,
            vectors=config["vectors"],
            threads=config["threads"],
            # The outermost size is what the count of elements says.
            sizes=", ".join(map(str, (1, *geometry.sizes[1:]))),
            strides=", ".join(f"{{{', '.join(map(str, row))}}}" for row in geometry.strides),
            lines="\n    ".join((*expression.lines, *made)),
        )

    def bind(self, step: Step, config: Attrs, frame: Frame) -> Binding:
        chain, values, count = _Chain(step, config), frame.values, step.outputs[-1][1].numel
        kernel = VectorKernel(frame.built, int(config["threads"]))
        names = [operand.name for operand in chain.expression.operands]
        # The source is written for constants in nchw.
        constants = {name: in_rows(step, name, frame) for name in step.constants}
        block = chain.geometry.width * int(config["threads"]) * int(config["vectors"])
        grid = (-(-count // block), 1, 1)

        def launch(stream: int) -> None:
            read = [constants[n].tensor if n in constants else values[n] for n in names]
            made = [values[name] for name, _ in step.outputs]
            addresses = [tensor.data_ptr() for tensor in (*read, *made)]
            kernel.launch(stream, grid, [members(*addresses, count)], read)

        return Binding(launch, constants=tuple(constants.values()))


class _Chain:
    """What a step computes, and the addresses of its elements with a config."""

    def __init__(self, step: Step, config: Attrs) -> None:
        self.step, self.config = step, config

    @cached_property
    def expression(self) -> Expression:
        return expression_of(self.step)

    @cached_property
    def geometry(self) -> Geometry:
        width = VECTOR_BYTES // self.step.outputs[-1][1].torch_dtype.itemsize
        return geometry_of(self.step, self.expression, self.config["layout"], width)


FAMILY = Pointwise()
