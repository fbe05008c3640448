"""What a GPU packs in each pass for a module whose filters are NCHW, beside channels_last."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from plantune.graph import Step, TensorType
from plantune.kernels.family import Candidate
from plantune.kernels.registry import family_named
from plantune.report.tables import bytes_text, counted, us_text
from plantune.space.arch import Arch

# What the launch itself takes, on an H200 (2026-11-22).
LAUNCH_US = 3.0


@dataclass(frozen=True)
class Packing:
    """The filters that kernels read in channels_last. `us` is an estimate: each is read and written
    once at the chip's datasheet bandwidth, in one launch.
    """

    filters: int
    size_bytes: int
    us: float | None

    def to_json(self) -> dict[str, Any]:
        return {"filters": self.filters, "bytes": self.size_bytes, "estimated_us": self.us}


def packing_of(steps: Iterable[tuple[Step, Candidate]], arch: Arch) -> Packing | None:
    """What is packed if the parameters are NCHW; None if nothing is."""
    filters: dict[str, int] = {}
    for step, candidate in steps:
        if family_named(candidate.family).reads_channels_last:
            filters |= {name: type_.size_bytes for name, type_ in _filters_of(step)}
    if not filters:
        return None
    size_bytes = sum(filters.values())
    us = None
    if arch.chip is not None:  # GB/s are 1,000 bytes a microsecond
        us = LAUNCH_US + 2 * size_bytes / (1e3 * arch.chip.memory_gb_per_s)
    return Packing(len(filters), size_bytes, us)


def _filters_of(step: Step) -> Iterable[tuple[str, TensorType]]:
    """The filters whose order in memory differs between NCHW and channels_last."""
    for node in step.nodes:
        if node.op != "conv2d" or node.inputs[1] not in step.constants:
            continue
        type_ = step.types[node.inputs[1]]
        _, channels, height, width = type_.shape
        if channels > 1 and height * width > 1:
            yield node.inputs[1], type_


def packing_text(packing: Packing) -> str:
    size = f"{counted(packing.filters, 'filter')}, {bytes_text(packing.size_bytes)}"
    about = "" if packing.us is None else f", about {us_text(packing.us)} by the chip's datasheet"
    return (
        f"if a module's filters are NCHW, each pass packs {size} first{about}; "
        "module.to(memory_format=torch.channels_last) saves that (load_model does it by itself)"
    )
