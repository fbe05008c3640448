"""Kernels that read 16 bytes at once, and their twin for tensors that are not so aligned."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import Tensor

from plantune.devices.cuda.build import Binary
from plantune.graph import Step, TensorType
from plantune.kernels.cuda.launcher import Launcher
from plantune.kernels.family import Binding, Frame
from plantune.kernels.weights.constants import rows_of

VECTOR_BYTES = 16
# How csrc/cuda/vector.h names the dtypes that it computes with.
ELEMENTS = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float"}
# The ends of a source whose header defines `Kernel`.
ENTRIES = """
extern "C" __global__ __launch_bounds__({threads}) void run(Kernel::Arguments arguments) {{
  Kernel::run<true>(arguments);
}}
extern "C" __global__ __launch_bounds__({threads}) void run_unaligned(
    Kernel::Arguments arguments) {{
  Kernel::run<false>(arguments);
}}
"""
# The same for a second kernel that collects sums.
COLLECT = ENTRIES.replace("run", "collect")


def source(
    header: str, kernel: str, threads: int, before: str = "", entries: str = ENTRIES, **sizes: int
) -> str:
    """The source of a `kernel` of csrc/cuda, whose parts the lines `before` it define."""
    text = f'#include "cuda/{header}.h"\n{before}using Kernel = plantune::{kernel};'
    return text + entries.format(threads=threads, **sizes)


class VectorKernel:
    """`run` and `run_unaligned` of one binary, or those of another `name`; the addresses at a
    launch choose between them.
    """

    def __init__(
        self,
        binary: Binary,
        blocks: int | tuple[int, int],
        threads: int,
        shared_bytes: int = 0,
        *,
        name: str = "run",
        cluster: int = 1,
    ) -> None:
        self._aligned, self._unaligned = (
            Launcher(binary, blocks, threads, name=each, shared_bytes=shared_bytes, cluster=cluster)
            for each in (name, f"{name}_unaligned")
        )

    def launch(
        self, stream: int, arguments: Any, read: Iterable[Tensor], *, whole: bool = True
    ) -> None:
        """Launches the kernel that may `read` these tensors, of which all pixels are `whole`
        vectors apart or not.
        """
        aligned = whole and not any(tensor.data_ptr() % VECTOR_BYTES for tensor in read)
        (self._aligned if aligned else self._unaligned).launch(stream, arguments)


def width(type_: TensorType) -> int:
    """Elements of one vector."""
    return VECTOR_BYTES // type_.torch_dtype.itemsize


def index_of(elements: int) -> str:
    """The type that counts so many elements."""
    return "unsigned" if elements < 1 << 31 else "unsigned long long"


def dtypes_of(step: Step) -> frozenset[str]:
    """The element types of all that a step reads, makes or stores."""
    made = (type_ for node in step.nodes for type_ in node.types)
    operands = (type_ for _, type_ in (*step.inputs, *step.outputs))
    return frozenset(type_.dtype for type_ in (*made, *operands))


def not_an_element(*dtypes: str) -> dict[str, bool]:
    """The reason that these kernels do not compute with some dtypes, and whether it holds."""
    known, others = ", ".join(ELEMENTS), sorted({*dtypes} - ELEMENTS.keys())
    return {f"the kernel is written for {known}, got {', '.join(others)}": bool(others)}


def members(*values: int) -> ctypes.Array[ctypes.c_longlong]:
    """A struct of addresses and 64-bit integers."""
    return (ctypes.c_longlong * len(values))(*values)


def bound(
    kernels: Sequence[VectorKernel],
    step: Step,
    frame: Frame,
    arguments: Iterable[str | int | None],
    read: Collection[str],
    *,
    last: Launcher | None = None,
) -> Binding:
    """Launches kernels of a step one after another, and then the `last`. Their arguments are
    numbers and the addresses of values, 0 for what does not enter or leave the step. Constants are
    read in rows. What is `read` by vectors may be unaligned.
    """
    constants, known = rows_of(step, frame), {*dict(step.inputs), *dict(step.outputs)}
    found = [each if isinstance(each, int) or each in known else 0 for each in arguments]

    def launch(stream: int) -> None:
        places = (constants.tensor(a).data_ptr() if isinstance(a, str) else a or 0 for a in found)
        given, images = members(*places), [constants.tensor(name) for name in read]
        for kernel in kernels:
            kernel.launch(stream, given, images)
        if last is not None:
            last.launch(stream, given)

    return Binding(launch, constants=constants.all)
