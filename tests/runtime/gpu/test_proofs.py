"""How a plan is proved on a GPU: against references in float32 where 16 bits decide the errors."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from plantune import optimize
from plantune.devices.machine import arch_of
from plantune.errors import WrongResult
from plantune.kernels import torch_ops
from plantune.plans.checked_plan import check_plan
from plantune.plans.guess import framework_plan
from plantune.runtime.calls.choose import PredictedPlan
from plantune.runtime.proof import cases, recheck
from plantune.space.search_space import load_search_space

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("narrow", "width"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float64),
    ],
    ids=str,
)
def test_training_under_wide_norms(
    monkeypatch: pytest.MonkeyPatch, narrow: torch.dtype, width: torch.dtype
) -> None:
    """A right plan passes, and a kernel that is off by a tenth is found."""
    seen = set[torch.dtype]()
    judge = recheck.judgeable

    def noted(*given: Any) -> cases.Case:
        case = judge(*given)
        seen.update(value.dtype for value in case.exact.values())
        return case

    monkeypatch.setattr(recheck, "judgeable", noted)
    net = nn.Sequential(nn.Conv2d(3, 16, 3).to(narrow), nn.BatchNorm2d(16), nn.ReLU()).cuda()
    x = torch.randn(8, 3, 16, 16, device="cuda", dtype=narrow)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PredictedPlan)
        graph = optimize(net, x, mode="train").pool().graph
    space = load_search_space(arch_of(x.device))
    plan = framework_plan(graph, space, network="wide norms")
    recheck.recheck(check_plan(plan, graph, space), net)
    assert seen == {width}

    def write(node: Any, y: torch.Tensor) -> Any:
        return lambda x: torch.clamp(x, min=0, out=y).mul_(1.1)

    monkeypatch.setitem(torch_ops.WRITERS, "relu", write)
    with pytest.raises(WrongResult, match="is off by"):
        recheck.recheck(check_plan(plan, graph, space), net)
