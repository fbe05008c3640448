"""What torch rounds factors of float32 to on a GPU, where a plan or a trial depends on it."""

from __future__ import annotations

from plantune.base.canonical import digest
from plantune.devices.cuda.flags import Precisions, float32_precisions
from plantune.graph import Graph, Step


def precisions_of(computed: Graph | Step, arch: str) -> Precisions:
    """Torch's settings at this moment; none if nothing that is computed depends on them."""
    return float32_precisions() if computed.multiplies_float32 and arch != "cpu" else ()


def trial_key(step: Step, arch: str) -> str:
    """By what the trials of a step are found. Those of float32 from before settings were kept may
    be of any: on a GPU they are not found, and measured again.
    """
    precisions = precisions_of(step, arch)
    return digest([step.signature, *precisions]) if precisions else step.signature
