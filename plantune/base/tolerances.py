"""What a right result may be off beside twice PyTorch's own error: one table, each with its reason.

Every bound here is `2 * PyTorch's own error + a tolerance`, as parts of the result's size. Where
the first error bounds too tightly, PyTorch's own is the largest of those in the other layout and
after other roundings: its kernels for channels_last are less exact, and few elements may have a
small error by luck.

A tolerance is at most a tenth of PyTorch's own error on typical steps, or its reason says why it is
more; tests/base/test_tolerances.py measures that. PyTorch's own error by norm (2 cores of an AMD
EPYC, 2026-11-22): 5e-8 to 5e-7 in float32, 2e-4 to 3e-4 in float16, 1.5e-3 to 2.3e-3 in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """`by_luck`: it stands for the luck of a result of one element, and goes down with the square
    root of their number.
    """

    value: float
    reason: str
    by_luck: bool = False

    def of(self, elements: int) -> float:
        return self.value / math.sqrt(max(elements, 1)) if self.by_luck else self.value


# Half the distance of two neighbours: what storing a value in 16 bits rounds.
HALF, BRAIN = (torch.finfo(dtype).eps / 2 for dtype in (torch.float16, torch.bfloat16))

ORDER = (
    "The reference has no more digits, so PyTorch's own error is nothing or luck; this is for sums "
    "in another order"
)
WINOGRAD = (
    "Winograd and Karatsuba tiles may lose three bits more than PyTorch's sums; "
    "an error of a float16 or tf32 rounding is 500 times as much"
)
ONCE_MORE = (
    "One rounding: a kernel may store a value in 16 bits once more than PyTorch does between two "
    "ops of a step, if the own error of few elements is small by luck"
)
LUCK = (
    "PyTorch rounds a result of few elements luckily now and then; from 600 elements on this is "
    "less than a tenth of its own error"
)
OTHER_ROUTES = (
    "PyTorch's other routes, whose algorithms are not those of eager (cuDNN's Winograd in 16 bits "
    "among them), shall not be turned away for their rounding: that would flatter the plan. The "
    "plan itself is held to `step` and `network`"
)
CANCELS = (
    "A gradient may be a sum over all pixels that nearly cancels, and that kernels store in 16 "
    "bits several times on the way where PyTorch keeps float32"
)
ONE_INPUT = "One input of the user's, by its worst element: PyTorch's own error may be luck there"
SUMS_OF_GRADIENTS = 16
# So often PyTorch's results are computed again where they refuse, with inputs and weights that
# differ by a rounding, and the largest error counts. At a maximum of two almost equal elements each
# run takes the other one in about half of all cases, and the gradient jumps: by 2 % on one of seven
# draws (volo_d1_224, float32, 2026-11-24). Of a result of one element, whose error is normal, in
# 1 case of 20 none of 8 errors is as large as the typical one.
AGAIN = 8


def _table(
    double: float,
    single: float,
    halves: float,
    reason: str,
    *,
    luck: bool = False,
    of_single: str = WINOGRAD,
) -> Mapping[str, Tolerance]:
    """Of results in float64, in float32, and in both dtypes of 16 bits by their own rounding."""
    return {
        "float64": Tolerance(double, ORDER),
        "float32": Tolerance(single, of_single),
        "float16": Tolerance(halves * HALF, reason, luck),
        "bfloat16": Tolerance(halves * BRAIN, reason, luck),
    }


# By what is judged, then by the dtype of the result.
TABLE: Mapping[str, Mapping[str, Tolerance]] = {
    # One step on random data: `measure.numerics`.
    "step": _table(1e-14, 1e-6, 1, ONCE_MORE),
    # The outputs of a whole network on random data: `runtime.recheck`.
    "network": _table(1e-10, 1e-6, 1, LUCK, luck=True),
    # Its gradients.
    "gradient": _table(1e-10, 1e-6, SUMS_OF_GRADIENTS, CANCELS),
    # The outputs on an input of the user's: `runtime.check`.
    "check": _table(1e-10, 1e-6, 1, ONE_INPUT),
    # Outputs of all that run in a race: `measure.race`.
    "race": _table(4e-14, 4e-6, 8, OTHER_ROUTES, of_single=OTHER_ROUTES),
}


def tolerance(of: str, dtype: torch.dtype | str, elements: int = 1) -> float:
    """The part of the result's size that is allowed; 0 for what is exact, such as counters."""
    found = TABLE[of].get(str(dtype).removeprefix("torch."))
    return 0.0 if found is None else found.of(elements)
