"""Results lie in a GPU's memory as eager's do, whichever kernels made them."""

from __future__ import annotations

import pytest
import torch

from plantune.runtime.calls import choose

from ..strides import run_beside_eager

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU"),
]


@pytest.mark.parametrize("seed", range(40))
def test_of_any_network(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From guesses, which run also where they are not known to be faster."""
    monkeypatch.setattr(choose, "is_unsure", lambda graph, plan: False)
    run_beside_eager(seed, "cuda", how=None)
