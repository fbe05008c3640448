"""The gradients of a GRU over a sequence: `csrc/cuda/gru_scan_grad.h`."""

from __future__ import annotations

from typing import ClassVar

from plantune.kernels.recurrent.scan_gradient import ScanGradient
from plantune.kernels.recurrent.scan_launches import structure

OF_SCAN = ("gates", "of_state", "weight", "rows", "done", "words", "launches")


class GruScanGrad(ScanGradient):
    """Config: see ScanFamily."""

    name: ClassVar = "gru_scan_grad"
    kernel: ClassVar = "GruScanGrad"
    inputs: ClassVar = ("dy", "y", "gates", "state", "weight", "bias", "done")
    outputs: ClassVar = ("dgates", "dstate", "dweight", "dbias")
    arguments: ClassVar = structure(OF_SCAN, ("dy", "before", "dgates", "dstate"))
    begins: ClassVar = {"before": ("state", "y")}
    written: ClassVar = ("dgates", "dstate")
    has_rows: ClassVar = True


FAMILY = GruScanGrad()
