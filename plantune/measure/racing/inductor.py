"""Gets torch's compilers ready to try many kernels for each operation."""

from __future__ import annotations

from contextlib import suppress


def prepare_workers() -> None:
    """Waits for torch's compile workers, and uses their assembler in this process too.

    torch comes with a ptxas of its own, which only its workers use, and Triton keeps binaries of
    two versions apart. Without this, whatever the workers built would be built again, one kernel
    after another, as soon as it is timed here (torch 2.11 with CUDA 13.0).
    """
    # These are torch's own functions: a version without them compiles as slowly as it always did.
    with suppress(ImportError, AttributeError):
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

        _set_triton_ptxas_path()
        AsyncCompile.wait_pool_ready()
