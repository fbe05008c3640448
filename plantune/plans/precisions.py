"""Torch's settings for float32 products on a GPU, for the plans and trials that depend on them."""

from __future__ import annotations

from plantune.base.canonical import digest
from plantune.devices.cuda.flags import Precisions, float32_precisions
from plantune.graph import Graph, Step


def precisions_of(computed: Graph | Step, arch: str) -> Precisions:
    """Torch's current settings; empty if the result does not depend on them."""
    return float32_precisions() if computed.multiplies_float32 and arch != "cpu" else ()


def trial_key(step: Step, arch: str) -> str:
    """The key by which the trials of a step are stored. Float32 trials from before settings were
    kept may have run under any of them, so on a GPU they are not found, and measured again.
    """
    precisions = precisions_of(step, arch)
    return digest([step.signature, *precisions]) if precisions else step.signature
