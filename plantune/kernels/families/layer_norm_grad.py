"""The gradients of layer norms: `csrc/cuda/layer_norm_grad.h`."""

from __future__ import annotations

from typing import ClassVar

from plantune.graph import Step
from plantune.kernels.cuda import vector_kernel
from plantune.kernels.cuda.cuda_family import Arch, Attrs, Binding, CudaFamily, Frame, refuse
from plantune.kernels.patterns.sample_norm import GradientOfNorm, RowsOfNorm, row_work_us
from plantune.kernels.rendering import struct

# Elements of a row that a thread holds, with as many of dy and of two sums.
HELD_MAX = 32
# Sums of a block meet in shared memory that needs no leave.
SHARED_BYTES_MAX = 40 << 10
# More leave more to add: two for each multiprocessor of the chip that was measured.
BLOCKS = 264


class LayerNormGradParts(GradientOfNorm, RowsOfNorm):
    """The gradients of a norm of rows."""

    def blocks(self, config: Attrs) -> int:
        at_once = int(config["threads"]) // int(config["lanes"])
        return min(-(-self.rows // at_once), BLOCKS)


class LayerNormGrad(CudaFamily[LayerNormGradParts]):
    """Config: a row stays with so many `lanes` of a block's `threads`."""

    name: ClassVar = "layer_norm_grad"
    mixes_types: ClassVar = True
    image_layout = "nchw"  # a row is contiguous

    def read(self, step: Step) -> LayerNormGradParts:
        norm = step.nodes[0]
        refuse({f"only a layer norm's gradient, got {step.ops}": step.ops != ("layer_norm_grad",)})
        parts = LayerNormGradParts(step, norm)
        parts.require_alone()
        statistics = [step.types[name].dtype for name in norm.inputs[2:4]]
        refuse(
            {
                "the statistics are not float32": statistics != ["float32", "float32"],
                f"rows of {parts.size} are too wide for a block's sums": 4 * parts.sums * parts.size
                > SHARED_BYTES_MAX,
            }
        )
        return parts

    def why_not_config(self, parts: LayerNormGradParts, config: Attrs, arch: Arch) -> str | None:
        return parts.why_not(config, HELD_MAX)

    def workspace_bytes(self, parts: LayerNormGradParts, config: Attrs) -> int:
        return 4 * parts.blocks(config) * parts.sums * parts.size

    def estimate_us(self, parts: LayerNormGradParts, config: Attrs, arch: Arch) -> float:
        """Like the norm, whose cost table it shares; the blocks' sums are moved twice, and rows
        come to a block one after the other.
        """
        cost, lanes = arch.cost("layer_norm"), int(config["lanes"])
        moved = parts.step.traffic_bytes + 2 * self.workspace_bytes(parts, config)
        turns = parts.rows * lanes / (parts.blocks(config) * int(config["threads"]))
        work = row_work_us(cost, moved, parts.size, parts.held(lanes), lanes, max(turns, 1.0))
        launches = 2 if parts.sums else 1
        return launches * cost["launch_us"] + work * self.slowdown(parts, arch)

    def source(self, parts: LayerNormGradParts, config: Attrs, arch: Arch) -> str:
        norm = struct(
            "Norm",
            kSize=parts.size,
            kVector=parts.vector,
            kSums=parts.sums,
            kLanes=config["lanes"],
            kThreads=config["threads"],
            **parts.types,
        )
        kernel, threads = "LayerNormGrad<Norm>", config["threads"]
        return vector_kernel.source(self.name, kernel, threads, norm, parts.entries)

    def bind(self, parts: LayerNormGradParts, config: Attrs, frame: Frame) -> Binding:
        blocks, threads = parts.blocks(config), int(config["threads"])
        return parts.bind(frame, blocks, threads, parts.size, (parts.rows, blocks))


FAMILY = LayerNormGrad()
