"""Linear layers of few rows: each element of the result is a dot product of a warp."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from plantune.canonical import Attrs
from plantune.errors import IllegalCandidate
from plantune.graph.step import Step
from plantune.kernels.constants import in_rows
from plantune.kernels.cuda_family import CudaFamily
from plantune.kernels.family import Binding, Frame
from plantune.kernels.vector_kernel import ELEMENTS, VECTOR_BYTES, VectorKernel, members
from plantune.space.arch import Arch

THREADS, WARPS = 256, 8
# Beyond it the same weights are read again and again.
ROWS_MAX = 2048
ACTIVATIONS = {"relu": "kRelu", "sigmoid": "kSigmoid"}
SOURCE = """#include "cuda/linear.h"
using Kernel = plantune::Linear<{element}, {rows}, {columns}, {depth}, {width}, {threads},
                                plantune::Activation::{activation}>;
extern "C" __global__ __launch_bounds__({threads}) void run(Kernel::Arguments arguments) {{
  Kernel::run<true>(arguments);
}}
extern "C" __global__ __launch_bounds__({threads}) void run_unaligned(
    Kernel::Arguments arguments) {{
  Kernel::run<false>(arguments);
}}
"""


@dataclass(frozen=True)
class Layer:
    """y (m, n) = activation(a (m, depth) times b (n, depth) transposed + bias)."""

    a: str
    b: str
    bias: str | None
    activation: str
    m: int
    n: int
    depth: int


class Linear(CudaFamily):
    """Config: a block makes `tile_n` columns of so many `rows`."""

    name: ClassVar = "linear"

    def why_not_step(self, step: Step) -> str | None:
        try:
            layer = layer_of(step)
        except IllegalCandidate as reason:
            return str(reason)
        dtype = step.types[layer.a].dtype
        if dtype not in ELEMENTS:
            return f"the kernel is written for {', '.join(ELEMENTS)}, got {dtype}"
        if 0 in (layer.m, layer.n, layer.depth):
            return "there is nothing to multiply"
        if layer.m > ROWS_MAX:
            return f"it is for {ROWS_MAX} rows at most, got {layer.m}"
        return None

    def why_not_config(self, step: Step, config: Attrs, arch: Arch) -> str | None:
        m = layer_of(step).m
        if config["rows"] >= 2 * m:
            return f"half of {config['rows']} rows hold the {m} that are there"
        if config["tile_n"] % WARPS:
            return f"{WARPS} warps do not divide {config['tile_n']} columns"
        return super().why_not_config(step, config, arch)

    def threads(self, step: Step, config: Attrs) -> int:
        return THREADS

    def source(self, step: Step, config: Attrs, arch: Arch) -> str:
        layer = layer_of(step)
        type_ = step.types[layer.a]
        return SOURCE.format(
            element=ELEMENTS[type_.dtype],
            rows=config["rows"],
            columns=config["tile_n"] // WARPS,
            depth=layer.depth,
            width=math.gcd(VECTOR_BYTES // type_.torch_dtype.itemsize, layer.depth),
            threads=THREADS,
            activation=layer.activation,
        )

    def bind(self, step: Step, config: Attrs, frame: Frame) -> Binding:
        layer, values = layer_of(step), frame.values
        kernel = VectorKernel(frame.built, THREADS)
        y = step.nodes[-1].name
        constants = {name: in_rows(step, name, frame) for name in step.constants}
        grid = (-(-layer.n // int(config["tile_n"])), -(-layer.m // int(config["rows"])), 1)

        def read(name: str) -> torch.Tensor:
            return constants[name].tensor if name in constants else values[name]

        def launch(stream: int) -> None:
            a, b, to = read(layer.a), read(layer.b), values[y].data_ptr()
            bias = 0 if layer.bias is None else read(layer.bias).data_ptr()
            arguments = members(a.data_ptr(), b.data_ptr(), bias, to, layer.m, layer.n)
            kernel.launch(stream, grid, [arguments], [a, b])

        return Binding(launch, constants=tuple(constants.values()))


def layer_of(step: Step) -> Layer:
    """Reads a step; raises IllegalCandidate with the reason."""
    product, *rest = step.nodes
    ops = step.ops
    if ops[0] != "matmul" or ops[1:2] not in ((), ("add_channel",)) or len(ops) > 3:
        raise IllegalCandidate("only a matrix product with bias and activation")
    if len(ops) == 3 and ops[2] not in ACTIVATIONS:
        raise IllegalCandidate(f"{ops[2]} is none of {', '.join(ACTIVATIONS)}")
    for before, node in itertools.pairwise(step.nodes):
        if node.inputs[0] != before.name:
            raise IllegalCandidate(f"{node.name!r} does not read {before.name!r} before it")
    if [name for name, _ in step.outputs] != [step.nodes[-1].name]:
        raise IllegalCandidate("a value before the end of the step is read outside of it")
    if product.attrs["transpose_a"] or not product.attrs["transpose_b"]:
        raise IllegalCandidate("rows of both matrices must be contiguous along the inner axis")
    if rest and rest[0].attrs["axis"] != 1:
        raise IllegalCandidate("the bias is not one per column")
    a, b = product.inputs
    return Layer(
        a=a,
        b=b,
        bias=rest[0].inputs[1] if rest else None,
        activation=ACTIVATIONS[ops[2]] if len(ops) == 3 else "kNone",
        m=step.types[a].shape[0],
        n=step.types[b].shape[0],
        depth=step.types[a].shape[1],
    )


FAMILY = Linear()
