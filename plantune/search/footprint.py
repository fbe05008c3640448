"""What a compiled kernel takes of a chip that is not here."""

from __future__ import annotations

from dataclasses import dataclass

from plantune.cuda.build import Binary
from plantune.graph.step import Step
from plantune.kernels.cuda_family import CudaFamily, block_shared_bytes
from plantune.kernels.family import Candidate
from plantune.kernels.registry import family_named
from plantune.measure.outcome import Rejected
from plantune.space.arch import Arch


@dataclass(frozen=True)
class Footprint:
    """What a block of a kernel takes, as the assembler counted it; zeros where nobody counts."""

    threads: int = 0
    registers: int = 0
    shared_bytes: int = 0


def footprint_of(
    step: Step, candidate: Candidate, built: object, arch: Arch
) -> Footprint | Rejected:
    """What a block of a built kernel takes; rejected where registers do not suffice for it."""
    family = family_named(candidate.family)
    if not isinstance(built, Binary) or not isinstance(family, CudaFamily):
        return Footprint()
    used = built.usage["run"]
    if used.spill_bytes:
        return Rejected("build", f"it spills {used.spill_bytes} bytes of a thread's registers")
    shared = block_shared_bytes(used, arch) + family.block_bytes(step, candidate.config, arch)
    return Footprint(family.threads(step, candidate.config), used.registers, shared)
