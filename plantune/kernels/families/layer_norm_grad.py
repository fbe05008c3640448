"""The gradients of layer norms: `csrc/cuda/layer_norm_grad.h`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from plantune.graph import Node, Step, TensorType
from plantune.kernels import vector_kernel
from plantune.kernels.constants import rows_of
from plantune.kernels.cuda_family import Arch, Attrs, CudaFamily, first_reason, refuse
from plantune.kernels.family import Binding, Frame, Parts, images
from plantune.kernels.rendering import struct

# Elements of a row that a thread holds, with as many of dy and of two sums.
HELD_MAX = 32
# Sums of a block meet in shared memory that needs no leave.
SHARED_BYTES_MAX = 40 << 10
# More leave more to add: two for each multiprocessor of the chip that was measured.
BLOCKS = 264
COLUMNS = 32  # that a block collects


@dataclass(frozen=True)
class LayerNormGradParts(Parts):
    """The gradients of x, and of the first `sums` of weight and bias."""

    @property
    def norm(self) -> Node:
        return self.step.nodes[0]

    @property
    def type(self) -> TensorType:
        return self.norm.types[0]

    @property
    def sums(self) -> int:
        return int(self.norm.attrs["affine"])

    @property
    def size(self) -> int:
        """Elements of a row."""
        return math.prod(self.type.shape[-self.norm.attrs["axes"] :])

    @property
    def rows(self) -> int:
        return self.type.numel // self.size

    @property
    def vector(self) -> int:
        return math.gcd(self.size, vector_kernel.width(self.type))

    def held(self, lanes: int) -> int:
        """Elements that a thread holds."""
        return -(-self.size // self.vector // lanes) * self.vector

    def blocks(self, config: Attrs) -> int:
        at_once = int(config["threads"]) // int(config["lanes"])
        return min(-(-self.rows // at_once), BLOCKS)


class LayerNormGrad(CudaFamily[LayerNormGradParts]):
    """Config: a row stays with so many `lanes` of a block's `threads`."""

    name: ClassVar = "layer_norm_grad"

    def read(self, step: Step) -> LayerNormGradParts:
        norm = step.nodes[0]
        refuse({f"only a layer norm's gradient, got {step.ops}": step.ops != ("layer_norm_grad",)})
        parts = LayerNormGradParts(step)
        statistics = [step.types[name].dtype for name in norm.inputs[2:4]]
        refuse(
            {
                **vector_kernel.not_an_element(parts.type.dtype),
                "the statistics are not float32": statistics != ["float32", "float32"],
                "dy and x have two dtypes": step.types[norm.inputs[0]].dtype != parts.type.dtype,
                "there is nothing to normalise": parts.type.numel == 0,
                f"rows of {parts.size} are too wide for a block's sums": 4 * parts.sums * parts.size
                > SHARED_BYTES_MAX,
                "weights are in nchw": step.phase == "refresh"
                or not step.constants.isdisjoint(norm.inputs[:4]),
            }
        )
        return parts

    def layouts(self, parts: LayerNormGradParts, config: Attrs) -> Mapping[str, str]:
        """A row is contiguous."""
        return images(parts.step, "nchw")

    def why_not_config(self, parts: LayerNormGradParts, config: Attrs, arch: Arch) -> str | None:
        lanes, threads = int(config["lanes"]), int(config["threads"])
        held = parts.held(lanes)
        idle = lanes > 4 and held == parts.held(lanes // 2)
        return first_reason(
            {
                f"a block of {threads} threads has no {lanes} for a row": lanes > threads,
                f"a thread would hold {held} elements, {HELD_MAX} fit": held > HELD_MAX,
                f"{lanes} lanes are more than a row has vectors": idle,
            }
        )

    def workspace_bytes(self, parts: LayerNormGradParts, config: Attrs) -> int:
        return 4 * parts.blocks(config) * parts.sums * parts.size

    def estimate_us(self, parts: LayerNormGradParts, config: Attrs, arch: Arch) -> float:
        """As of the norm itself, whose costs these are; what blocks leave is moved twice, and rows
        come to a block one after the other.
        """
        cost, lanes = arch.cost("layer_norm"), int(config["lanes"])
        held = parts.held(lanes)
        moved = parts.step.traffic_bytes + 2 * self.workspace_bytes(parts, config)
        turns = parts.rows * lanes / (parts.blocks(config) * int(config["threads"]))
        work = moved / cost["bytes_per_us"] / (parts.size / (held * lanes))
        work += max(turns, 1.0) * held * cost["element_us"]
        launches = 2 if parts.sums else 1
        return launches * cost["launch_us"] + work * self.slowdown(parts, arch)

    def source(self, parts: LayerNormGradParts, config: Attrs, arch: Arch) -> str:
        norm = struct(
            "Norm",
            T=vector_kernel.ELEMENTS[parts.type.dtype],
            kSize=parts.size,
            kVector=parts.vector,
            kSums=parts.sums,
            kLanes=config["lanes"],
            kThreads=config["threads"],
        )
        entries = vector_kernel.ENTRIES + (vector_kernel.COLLECT if parts.sums else "")
        return vector_kernel.source(
            self.name, "LayerNormGrad<Norm>", config["threads"], norm, entries
        )

    def bind(self, parts: LayerNormGradParts, config: Attrs, frame: Frame) -> Binding:
        constants, values = rows_of(parts.step, frame), frame.values
        threads, blocks = int(config["threads"]), parts.blocks(config)
        kernels = [vector_kernel.VectorKernel(frame.built, blocks, threads)]
        if parts.sums:
            columns = -(-parts.sums * parts.size // COLUMNS)
            kernels.append(
                vector_kernel.VectorKernel(frame.built, columns, threads, name="collect")
            )
        leaving = dict(parts.step.outputs)
        sums = 0 if frame.workspace is None else frame.workspace.data_ptr()

        def launch(stream: int) -> None:
            read = [constants.tensor(name) for name in parts.norm.inputs]
            given = [tensor.data_ptr() for tensor in read] + [0] * (5 - len(read))
            made = [values[n].data_ptr() if n in leaving else 0 for n in parts.norm.outputs]
            made += [0] * (3 - len(made))
            arguments = vector_kernel.members(*given, *made, sums, parts.rows, blocks)
            for kernel in kernels:
                kernel.launch(stream, arguments, [*read[:2], *read[4:]])

        return Binding(launch, constants=constants.all)


FAMILY = LayerNormGrad()
