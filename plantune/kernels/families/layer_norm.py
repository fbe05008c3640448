"""Layer norms with what follows them: `csrc/cuda/layer_norm.h`."""

from __future__ import annotations

from typing import ClassVar

from plantune.kernels.cuda import vector_kernel
from plantune.kernels.cuda.cuda_family import Arch, Attrs, Binding, CudaFamily, Frame, Step, refuse
from plantune.kernels.patterns.expression import expression, functors
from plantune.kernels.patterns.sample_norm import NormParts, RowsOfNorm, norm_parts, row_work_us
from plantune.kernels.rendering import struct

# Elements of a row that a thread holds: more do not fit into its registers.
HELD_MAX = 64


class LayerNormParts(NormParts, RowsOfNorm):
    """A norm of rows."""


class LayerNorm(CudaFamily[LayerNormParts]):
    """Config: a row stays with so many `lanes` of a block's `threads`."""

    name: ClassVar = "layer_norm"
    mixes_types: ClassVar = True
    image_layout = "nchw"  # a row is contiguous

    def read(self, step: Step) -> LayerNormParts:
        parts = norm_parts(LayerNormParts, step, self.name)
        kept = parts.dtype_of(parts.norm.outputs[1])
        refuse({f"the statistics are float32, not {kept}": kept != "float32"})
        return parts

    def why_not_config(self, parts: LayerNormParts, config: Attrs, arch: Arch) -> str | None:
        return parts.why_not(config, HELD_MAX)

    def estimate_us(self, parts: LayerNormParts, config: Attrs, arch: Arch) -> float:
        cost, lanes = arch.cost(self.name), int(config["lanes"])
        moved, held = parts.step.traffic_bytes, parts.held(lanes)
        work = row_work_us(cost, moved, parts.size, held, lanes)
        return cost["launch_us"] + work * self.slowdown(parts, arch)

    def source(self, parts: LayerNormParts, config: Attrs, arch: Arch) -> str:
        norm = struct(
            "Norm",
            Expression=expression(parts.chain),
            kSize=parts.size,
            kVector=parts.vector,
            kLanes=config["lanes"],
            kThreads=config["threads"],
            kEps=float(parts.norm.attrs["eps"]),
            **parts.affine,
            **parts.types,
        )
        before, threads = functors(parts.chain) + norm, config["threads"]
        return vector_kernel.source(self.name, "LayerNorm<Norm>", threads, before)

    def bind(self, parts: LayerNormParts, config: Attrs, frame: Frame) -> Binding:
        rows, threads = parts.rows, int(config["threads"])
        blocks = -(-rows // (threads // int(config["lanes"])))
        return parts.bind(frame, blocks, threads, rows)


FAMILY = LayerNorm()
