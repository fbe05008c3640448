"""A family of CUDA kernels for tests of measuring: each config misbehaves in its own way.

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
extern "C" __global__ void run(const __half* x, __half* y, long long size, int fault) {
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i >= size) return;
  const float value = __half2float(x[i]);
  y[i] = value < 0.f ? __float2half(0.f) : x[i];
  if (fault == 1) y[i] = __float2half(__half2float(y[i]) * 1.02f);
  if (fault == 2) __trap();
  if (fault == 3) *reinterpret_cast<volatile int*>(16) = 1;
  if (fault == 4) *reinterpret_cast<volatile int*>(reinterpret_cast<char*>(y) + 1) = 1;
  if (fault == 5) while (*reinterpret_cast<const volatile unsigned char*>(y) < 256) {}
  if (fault == 6 && i == 0) y[size + 4] = __float2half(1.f);
  if (fault == 7 && i == size - 1) y[i] = __ushort_as_half(0x7fff);
  if (fault == 8 && i == 0) const_cast<__half*>(x)[0] = __float2half(2.f);
  if (fault == 9) y[i] = __float2half(fmaxf(value, 0.f));
}
"""
FAULTS = (
    "none", "wrong", "trap", "illegal_address", "misaligned", "endless", "outside", "unwritten",
    "writes_input", "loses_nan", "ignores_stream", "synchronizes", "too_many_threads",
    "build_error", "idle",
)  # fmt: skip
THREADS, TOO_MANY_THREADS = 256, 2048
# It is captured only after it was launched so often.
LAUNCHES_OF_A_CHECK = 4


class FaultyCuda(KernelFamily[Parts]):
    """A ReLU of float16 values. Config: `fault`, what goes wrong."""

    name: ClassVar = "faulty_cuda"
    arch_kinds = frozenset(("cuda",))
    image_layout = "nchw"

    def read(self, step: Step) -> Parts:
        half = step.outputs[0][1].dtype == "float16"
        refuse({"only a relu of float16": step.ops != ("relu",) or not half})
        return Parts(step)

    def configs(self, space: SearchSpace) -> tuple[Attrs, ...]:
        return tuple(Attrs(fault=fault) for fault in FAULTS)

    def build(self, parts: Parts, config: Attrs, arch: Arch) -> Any:
        if config["fault"] == "build_error":
            return compile_cuda("this is no CUDA", arch)
        return compile_cuda(SOURCE, arch)

    def bind(self, parts: Parts, config: Attrs, frame: Frame) -> Binding:
        kernel, fault = Kernel(frame.built), config["fault"]
        (source, type_), (result, _) = parts.step.inputs[0], parts.step.outputs[0]
        size, threads = type_.numel, TOO_MANY_THREADS if fault == "too_many_threads" else THREADS
        number = FAULTS.index(fault) if FAULTS.index(fault) < 10 else 0
        direct = 0

        def launch(stream: int) -> None:
            nonlocal direct
            capturing = torch.cuda.is_current_stream_capturing()
            direct += not capturing
            if fault == "idle" and capturing and direct < LAUNCHES_OF_A_CHECK:
                return  # Fast, and nobody looks at the result any more.
            if fault == "synchronizes":
                torch.cuda.synchronize()
            arguments = [frame.values[source], frame.values[result]]
            numbers = [ctypes.c_longlong(size), ctypes.c_int(number)]
            kernel.launch(
                0 if fault == "ignores_stream" else stream,
                (-(-size // threads), 1, 1),
                threads,
                [*arguments, *numbers],
            )

        return Binding(launch)


FAMILY = FaultyCuda()
