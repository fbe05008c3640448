"""Which recurrent layers of torch's are read as scans (plantune/scans.py): those for which an arch
has kernels that are faster than the framework's layer.
"""

from __future__ import annotations

from collections.abc import Callable

from plantune.space.search_space import load_search_space

Scans = Callable[[str, str, int, int, int], bool]
# Hidden units by dtype: whole products for each of a block's warps, and what registers hold.
UNITS = {"float16": (128, 1024), "bfloat16": (128, 1024), "float32": (64, 512)}
# Around what was timed: 32 steps of 64 samples and 512 units took 0.49 to 0.69 of cuDNN's time,
# forward and backward, but an LSTM of one step 61.6 us of its 56.8 (128 samples, H200, 2026-11-23).
STEPS_MIN, SAMPLES_MIN, UNITS_MIN = 16, 16, 256


def scans_on(arch: str) -> Scans:
    """Whether a layer is read as scans of an op, by its dtype, steps, samples and hidden units."""
    families = load_search_space(arch).families

    def suits(op: str, dtype: str, steps: int, samples: int, hidden: int) -> bool:
        if not {op, f"{op}_grad"} <= set(families) or dtype not in UNITS:
            return False
        multiple, most = UNITS[dtype]
        large = steps >= STEPS_MIN and samples >= SAMPLES_MIN and hidden >= UNITS_MIN
        return large and hidden <= most and not hidden % multiple

    return suits
