"""The formulas of csrc/cuda/arithmetic.h, in float32 by torch, against float64."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

HEADER = Path(__file__).parents[3] / "csrc" / "cuda" / "arithmetic.h"


def part_below(x: Tensor) -> Tensor:
    """As the header computes it, with its numbers."""
    body = HEADER.read_text().partition("float part_below(")[2].partition("\n}")[0]
    (slope,) = re.findall(r"fabsf\(x\), ([\d.]+)f", body)
    first, *rest = re.findall(r"(-?[\d.]+)f[;)]", body.partition("float beyond = ")[2])
    t = 1 / (1 + x.abs() * float(slope))
    beyond = torch.full_like(x, float(first))
    for number in rest:
        beyond = beyond * t + float(number)
    beyond = beyond * t * torch.exp2(x * x * -0.72134752)
    return torch.where(x < 0, beyond, 1 - beyond)


def test_the_normal_distribution_is_known_to_float32s_digits() -> None:
    x = torch.linspace(-5.5, 8, 100_001)
    exact = torch.special.ndtr(x.double())
    error = (part_below(x).double() - exact).abs()
    assert error.max() < 2e-7
    negative = x < 0
    assert (error[negative] / exact[negative]).max() < 3e-5


def test_a_gelu_is_as_exact_as_torchs() -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 2
    exact = torch.nn.functional.gelu(x.double())
    ours = (x * part_below(x)).double()
    theirs = torch.nn.functional.gelu(x).double()
    assert (ours - exact).norm() < 2 * (theirs - exact).norm()
