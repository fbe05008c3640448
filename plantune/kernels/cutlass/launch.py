"""What the kernels of `csrc/cuda/implicit_gemm_conv.h` take, and the parameters that they make."""

from __future__ import annotations

import ctypes
from ctypes import c_char
from dataclasses import dataclass

import torch

from plantune.devices.cuda.build import Binary
from plantune.devices.cuda.kernel import Kernel
from plantune.devices.cuda.structs import fields

SPLIT_MODES = {"serial": 0, "parallel": 1}
PARAMS_BYTES_MAX = 4096
COUNTER_BYTES = 4
# The driver's share of each block's shared memory, and the unit in which it is allocated.
RESERVED_BYTES, SHARED_UNIT_BYTES = 1024, 128


class ConvProblem(ctypes.Structure):
    """`plantune::ConvProblem`."""

    _fields_ = fields(
        "n:int h:int w:int c:int k:int r:int s:int p:int q:int pad_h:int pad_w:int stride_h:int "
        "stride_w:int dilation_h:int dilation_w:int slices:int split_mode:int swizzle_log:int"
    )


class ConvOperands(ctypes.Structure):
    """`plantune::ConvOperands`."""

    _fields_ = fields("x w residual y scale bias offset partial counters applies:int64")


class Report(ctypes.Structure):
    """`ImplicitGemmConv::Report`: what the compiled kernel says of itself and of the problem."""

    _fields_ = fields(
        "params_bytes:int shared_bytes:int epilogue_bytes:int threads:int "
        "tiles:int[3] parts:int waits:int"
    )


@dataclass(frozen=True)
class Prepared:
    """A kernel's own report, and the parameters that it takes by value."""

    report: Report
    params: ctypes.Array[c_char]


def prepare(binary: Binary, problem: ConvProblem, device: torch.device) -> Prepared:
    """Lets the device derive a kernel's parameters, and waits for them."""
    memory = torch.zeros(2, PARAMS_BYTES_MAX, dtype=torch.uint8, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream
    Kernel(binary, "make_params").launch(stream, (1, 1, 1), 1, (problem, memory[0], memory[1]))
    reported, made = (bytes(row) for row in memory.tolist())
    report = Report.from_buffer_copy(reported)
    assert report.params_bytes <= PARAMS_BYTES_MAX
    params = (c_char * report.params_bytes).from_buffer_copy(made)
    return Prepared(report, params)


def evenly_spread_bytes(shared_bytes: int, blocks: int, device: torch.device) -> int:
    """Shared memory to ask for, so that no multiprocessor takes more than its share of the blocks.

    Blocks that are placed while the kernel before still runs go where there is room, which is
    not everywhere the same: a convolution of 128 blocks took 19.2 us after one that released it
    at its start, 9.1 us with this, and 10.2 us without any overlap (H200, 2026-11-20).
    """
    chip = torch.cuda.get_device_properties(device)
    share = -(-blocks // chip.multi_processor_count)
    too_many = chip.shared_memory_per_multiprocessor // (share + 1) - RESERVED_BYTES
    return max(shared_bytes, too_many // SHARED_UNIT_BYTES * SHARED_UNIT_BYTES + SHARED_UNIT_BYTES)
