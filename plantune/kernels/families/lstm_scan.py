"""An LSTM over a sequence in one launch: `csrc/cuda/lstm_scan.h`."""

from __future__ import annotations

from typing import ClassVar

from plantune.kernels.recurrent.scan_family import ScanFamily
from plantune.kernels.recurrent.scan_launches import structure

OF_SCAN = ("gates", "state", "weight", "bias", "done", "words", "launches")


class LstmScan(ScanFamily):
    """Config: see ScanFamily."""

    name: ClassVar = "lstm_scan"
    kernel: ClassVar = "LstmScan"
    inputs: ClassVar = ("gates", "state", "cell", "weight", "bias", "done")
    outputs: ClassVar = ("y", "cells")
    written: ClassVar = outputs
    arguments: ClassVar = structure(OF_SCAN, ("cell", "y", "cells"))


FAMILY = LstmScan()
