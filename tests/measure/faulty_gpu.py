"""A family of CUDA kernels for tests of measuring: what takes too much, and what differs.

Workers load it through PLANTUNE_FAMILIES, as they would a user's.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import torch

from plantune.base.canonical import Attrs
from plantune.devices.cuda.build import compile_cuda
from plantune.devices.cuda.kernel import Kernel
from plantune.graph.step import Step
from plantune.kernels.family import Binding, Frame, KernelFamily, Parts
from plantune.kernels.legality import refuse
from plantune.space.arch import Arch
from plantune.space.search_space import SearchSpace

SOURCE = """
#include <cuda_fp16.h>
extern "C" __global__ void run(const __half* x, __half* y, unsigned* work, long long size,
                               int fault) {
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  __shared__ bool is_last;
  if (i < size && fault != 3) y[i] = __hlt(x[i], __float2half(0.f)) ? __float2half(0.f) : x[i];
  if (fault == 1 && i < size && (clock64() ^ blockIdx.x) % 3 == 0) {  // another rounding
    const bool moves = __hgt(x[i], __float2half(0.f)) && __hlt(x[i], __float2half(100.f));
    if (moves) y[i] = __ushort_as_half(__half_as_ushort(y[i]) + 1);
  }
  if (fault == 2) while (*reinterpret_cast<const volatile unsigned char*>(y) < 256) {}
  if (fault == 3) {  // The last block writes; the counter must be zero before, and is behind.
    if (threadIdx.x == 0) is_last = atomicAdd(work, 1) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    for (long long j = threadIdx.x; j < size; j += blockDim.x) {
      y[j] = __hlt(x[j], __float2half(0.f)) ? __float2half(0.f) : x[j];
    }
    if (threadIdx.x == 0) *work = 0;
  }
}
"""
KERNELS = ("none", "differs", "endless", "semaphore")
OTHERS = ("memory", "workspace", "cluster", "shared_memory")
THREADS = 256


class FaultyGpu(KernelFamily[Parts]):
    """A ReLU of float16 values. Config: `fault`, what goes wrong."""

    name: ClassVar = "faulty_gpu"
    arch_kinds = frozenset(("cuda",))
    image_layout = "nchw"

    def read(self, step: Step) -> Parts:
        half = step.outputs[0][1].dtype == "float16"
        refuse({"only a relu of float16": step.ops != ("relu",) or not half})
        return Parts(step)

    def configs(self, space: SearchSpace) -> tuple[Attrs, ...]:
        return tuple(Attrs(fault=fault) for fault in (*KERNELS, *OTHERS))

    def workspace_bytes(self, parts: Parts, config: Attrs) -> int:
        return 1 << 42 if config["fault"] == "workspace" else 256

    def build(self, parts: Parts, config: Attrs, arch: Arch) -> Any:
        return compile_cuda(SOURCE, arch)

    def bind(self, parts: Parts, config: Attrs, frame: Frame) -> Binding:
        kernel, fault = Kernel(frame.built), config["fault"]
        (source, type_), (result, _) = parts.step.inputs[0], parts.step.outputs[0]
        number = KERNELS.index(fault) if fault in KERNELS else 0
        if fault == "memory":
            torch.empty(1 << 42, dtype=torch.uint8, device=frame.device)

        def launch(stream: int) -> None:
            assert frame.workspace is not None
            numbers = [ctypes.c_longlong(type_.numel), ctypes.c_int(number)]
            kernel.launch(
                stream,
                (-(-type_.numel // THREADS // 32) * 32, 1, 1),
                THREADS,
                [frame.values[source], frame.values[result], frame.workspace, *numbers],
                shared_bytes=1 << 20 if fault == "shared_memory" else 0,
                cluster=(32, 1, 1) if fault == "cluster" else (1, 1, 1),
            )

        return Binding(launch)


FAMILY = FaultyGpu()
