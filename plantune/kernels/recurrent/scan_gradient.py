"""What the gradients of recurrent layers over sequences share: a launch between matrix products of
torch's over all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from plantune.base.canonical import Attrs
from plantune.graph.layouts import aligned
from plantune.kernels.family import Frame
from plantune.kernels.recurrent.scan_division import Sequence
from plantune.kernels.recurrent.scan_family import ScanFamily
from plantune.space.arch import Arch


class ScanGradient(ScanFamily):
    """The states that steps begin with add their part to the gates in one product, and in another
    one meet the rows' gradients to those of the weights.
    """

    of_gradient = True
    launches_kernels = False
    # What steps begin with: the sequence's first, and where the later ones stand.
    begins: ClassVar[Mapping[str, tuple[str, str]]]
    # Whether what meets the weights is not the gradient of the gates.
    has_rows: ClassVar[bool] = False

    def workspace_bytes(self, parts: Sequence, config: Attrs) -> int:
        dtype = parts.step.types[parts.names["state"]].torch_dtype
        return sum(aligned(count * dtype.itemsize) for count in self._counts(parts).values())

    def estimate_us(self, parts: Sequence, config: Attrs, arch: Arch) -> float:
        cost = arch.cost(self.name)
        products = 4 * parts.step.types[parts.names["gates"]].numel * parts.hidden
        rate = cost["flops_per_us"] / (16 if parts.dtype == "float32" else 1)
        work = self.steps_us(parts, config, arch) + products / rate
        return cost["launch_us"] + work * self.slowdown(parts, arch)

    def _counts(self, parts: Sequence) -> dict[str, int]:
        """The values of a launch's own memory."""
        of_states = parts.steps * parts.samples * parts.hidden
        wide = ["of_state", *(["rows"] if self.has_rows else [])]
        return dict.fromkeys(self.begins, of_states) | dict.fromkeys(wide, of_states * parts.gates)

    def rooms(self, parts: Sequence, frame: Frame) -> Mapping[str, Tensor]:
        assert frame.workspace is not None
        dtype, start = parts.step.types[parts.names["state"]].torch_dtype, 0
        made = {}
        for name, count in self._counts(parts).items():
            room = frame.workspace[start : start + count * dtype.itemsize].view(dtype)
            made[name] = room.view(parts.steps, parts.samples, -1)
            start += aligned(count * dtype.itemsize)
        return made

    def around(self, at: dict[str, Tensor], run: Callable[[], None]) -> None:
        for name, (first, later) in self.begins.items():
            if (
                len(at[later]) == 1 and "done" not in at
            ):  # a step alone begins with what it was given
                at[name] = at[first][None]
                continue
            torch.cat((at[first][None], at[later][:-1]), out=at[name])
            if "done" in at:
                at[name].masked_fill_(at["done"][..., None], 0.0)
        before, of_state = at["before"].flatten(0, 1), at["of_state"].flatten(0, 1)
        torch.addmm(at["bias"], before, at["weight"].t(), out=of_state)
        if not self.has_rows:
            at["rows"] = at["dgates"]
        run()
        rows = at["rows"].flatten(0, 1)
        if "dweight" in at:
            torch.mm(rows.t(), before, out=at["dweight"])
        if "dbias" in at:
            torch.sum(rows, 0, out=at["dbias"])
