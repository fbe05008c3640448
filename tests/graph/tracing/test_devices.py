"""Where a module is, as its forward sees it in a trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plantune
from plantune.errors import UnsupportedModule
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.plans.plan import PROGRAM
from plantune.runtime.calls import choose


class Net(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(3, 3), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.layer(x))


def on_each_device(module: Any, x: Tensor) -> Tensor:
    made = x * (1 if x.device.type == "cpu" else 2)
    made = made * (1 if x.is_cpu and not x.is_meta else 3)
    made = made * (1 if str(module.layer.weight.device) == "cpu" else 5)
    return made * (1 if not x.is_cuda and x.get_device() == -1 else 7)


def moved_to_the_device(module: Any, x: Tensor) -> Tensor:
    module.layer.to(x.device)
    more = torch.arange(3, device=x.device).to(x.device, torch.float32)
    with torch.device(x.device):
        more = more + torch.arange(3)
    with torch.autocast(x.device.type, enabled=False):
        more = more + torch.full((3,), 2.0, device=str(x.device)).to(device=x.device)
    return x + more + torch.tensor([1.0, 2.0, 3.0], device=x.device)


@pytest.mark.parametrize("function", [on_each_device, moved_to_the_device])
def test_a_forward_that_branches_on_the_device(
    function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(choose.UNPLANNED, "cpu", PROGRAM)
    net, x = Net(function), torch.randn(2, 3)
    tuned = plantune.optimize(net, x)
    torch.testing.assert_close(tuned(x), net(x).detach())
    assert tuned.last_call().how == "planned"


def test_torchs_own_code_sees_where_the_trace_is() -> None:
    """It would hand over a whole layer to one kernel, of which no step could be planned."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with torch.no_grad():
        graph = extract(layer, TensorType((2, 4, 8), "float32"))
    assert not [node.op for node in graph.nodes if "transformer_encoder" in node.op]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda module, x: torch.vmap(F.relu)(x), "torch.func or torch.vmap"),
        (lambda module, x: torch.func.grad(lambda y: y.square().sum())(x), "torch.func"),
    ],
)
def test_transforms_inside_of_a_forward_are_refused(function: Any, said: str) -> None:
    with pytest.raises(UnsupportedModule, match=said):
        plantune.optimize(Net(function), torch.randn(2, 3))


def test_a_forward_that_only_returns_a_constant_is_refused() -> None:
    module, kept = nn.Identity(), torch.ones(2)
    module.forward = lambda x: kept
    with pytest.raises(UnsupportedModule, match="a constant tensor"):
        plantune.optimize(module, torch.randn(2, 3))
