"""The gradients of an LSTM over a sequence: `csrc/cuda/lstm_scan_grad.h`."""

from __future__ import annotations

from typing import ClassVar

from plantune.kernels.recurrent.scan_gradient import ScanGradient
from plantune.kernels.recurrent.scan_launches import structure

OF_SCAN = ("gates", "of_state", "weight", "rows", "done", "words", "launches")
OWN = ("dy", "dcells", "cells", "cell_before", "dstate", "dcell")


class LstmScanGrad(ScanGradient):
    """Config: see ScanFamily."""

    name: ClassVar = "lstm_scan_grad"
    kernel: ClassVar = "LstmScanGrad"
    inputs: ClassVar = (
        *("dy", "dcells", "y", "cells"),
        *("gates", "state", "cell", "weight", "bias", "done"),
    )
    outputs: ClassVar = ("dgates", "dstate", "dcell", "dweight", "dbias")
    arguments: ClassVar = structure(OF_SCAN, OWN)
    begins: ClassVar = {"before": ("state", "y"), "cell_before": ("cell", "cells")}
    written: ClassVar = ("dgates", "dstate", "dcell")


FAMILY = LstmScanGrad()
