"""A GRU over a sequence in one launch: `csrc/cuda/gru_scan.h`."""

from __future__ import annotations

from typing import ClassVar

from plantune.kernels.recurrent.scan_family import ScanFamily
from plantune.kernels.recurrent.scan_launches import structure

OF_SCAN = ("gates", "state", "weight", "bias", "done", "words", "launches")


class GruScan(ScanFamily):
    """Config: see ScanFamily."""

    name: ClassVar = "gru_scan"
    kernel: ClassVar = "GruScan"
    inputs: ClassVar = ("gates", "state", "weight", "bias", "done")
    outputs: ClassVar = ("y",)
    written: ClassVar = outputs
    arguments: ClassVar = structure(OF_SCAN, ("y",))


FAMILY = GruScan()
