"""What a forward keeps in caches of its own: the user's calls must not find what a trace made."""

from __future__ import annotations

import functools
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plantune
from plantune.errors import UnsupportedModule
from plantune.graph.tracing.side_effects import caches
from plantune.plans.plan import PROGRAM
from plantune.runtime.calls import choose

Table = Callable[[int, Any], Any]

IN_A_GLOBAL = """
import torch
made = None
def table(size, device):
    global made
    if made is None:
        made = torch.arange(size, device=device)
    return made
"""


def in_lru_cache() -> Table:
    return functools.lru_cache(lambda size, device: torch.arange(size, device=device))


def in_a_tuple() -> Table:
    @functools.cache
    def table(size: int, device: Any) -> tuple[Tensor, Tensor]:
        angles = torch.arange(size, device=device) / size
        return angles.cos(), angles.sin()

    return table


def in_a_dict() -> Table:
    tables: dict[Any, Tensor] = {}

    def table(size: int, device: Any) -> Tensor:
        if (size, device) not in tables:
            tables[size, device] = torch.arange(size, device=device)[None]
        return tables[size, device]

    return table


def in_a_global() -> Table:
    module = sys.modules["of_tables"] = types.ModuleType("of_tables")
    exec(IN_A_GLOBAL, vars(module))
    table: Table = module.table
    return table


class Net(nn.Module):
    def __init__(self, table: Any, *, fails: bool = False) -> None:
        super().__init__()
        self.layer, self.table, self.fails = nn.Linear(3, 3), table, fails

    def forward(self, x: Tensor) -> Any:
        parts = self.table(x.shape[1], x.device)
        made = self.layer(x)
        for part in parts if isinstance(parts, tuple) else (parts,):
            made = made * (1 + part)
        if self.fails and made.sum() > 0:
            return x
        return {"made": made, "ones": torch.ones(3), "more": [torch.zeros(2)]}


@pytest.fixture(params=[0, 1, 2], autouse=True)
def borrowed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """References that this Python, or another one, does not count in calls and loops."""
    count: int = request.param
    monkeypatch.setattr(caches, "getrefcount", lambda each: sys.getrefcount(each) - count)
    return count


@pytest.fixture(params=[in_lru_cache, in_a_tuple, in_a_dict, in_a_global])
def table(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Table]:
    """Made anew: the collector does not look at what it was told to freeze before."""
    monkeypatch.setitem(choose.UNPLANNED, "cpu", PROGRAM)
    yield request.param()
    sys.modules.pop("of_tables", None)


def test_a_plan_has_it_and_the_users_own_calls_make_it(table: Any) -> None:
    net, x = Net(table), torch.randn(2, 3)
    tuned = plantune.optimize(net, x)
    made = tuned(x)
    torch.testing.assert_close(made["made"], net(x)["made"].detach())
    assert torch.equal(made["ones"], torch.ones(3))
    assert torch.equal(made["more"][0], torch.zeros(2))
    assert tuned.last_call().how == "planned"


def test_it_is_gone_after_a_refusal_too(table: Any) -> None:
    net, x = Net(table, fails=True), torch.randn(2, 3)
    with pytest.raises(UnsupportedModule, match="branch or loop"):
        plantune.optimize(net, x)
    net.fails = False
    assert net(x)["made"].device.type == "cpu"


def test_what_others_have_is_told_from_what_only_the_trace_has() -> None:
    """On this Python, and on one that counts fewer references."""
    objects: list[Any] = [torch.ones(1), torch.ones(2), torch.ones(3)]
    elsewhere, of_trace = {"cache": objects[1]}, (objects[2],)
    held = caches._held_beside(objects, Counter([id(of_trace[0])]))
    assert [len(each) for each in held] == [len(elsewhere["cache"])]
