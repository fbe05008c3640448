"""What `tuned.summary()` says of a plan."""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from plantune import optimize
from plantune.base.canonical import Attrs
from plantune.plans.guess import hand_plan
from plantune.plans.plan import EAGER
from plantune.runtime.calls import choose
from plantune.runtime.calls.framework import LastCall
from plantune.runtime.module import TunedModule
from plantune.runtime.summary import Runs, headline_of, runs_of
from plantune.space.search_space import load_search_space

EVIDENCE = Attrs(ratio=0.5, ratio_low=0.4, ratio_high=0.6, baseline="eager", rivals="eager")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.conv(x)).flatten(1)
        return y.cumsum(1)


@pytest.fixture
def summary():
    module, x = Net().eval(), torch.randn(2, 3, 8, 8)
    graph = optimize(module, x).pool().graph
    plan = hand_plan(graph, load_search_space("cpu"), network="Net", without=("winograd",))
    return optimize(module, x, plan=replace(plan, evidence=EVIDENCE)).summary()


def test_it_counts_steps_and_names_ops_of_torch_with_their_lines(summary):
    assert (summary.ratio, summary.low, summary.high) == (0.5, 0.4, 0.6)
    assert summary.ours == sum(summary.families.values()) > 0
    assert (summary.framework, summary.views) == (1, 1)
    (op,) = summary.framework_ops
    first = inspect.getsourcelines(Net)[1]
    assert op.op == "aten.cumsum.default"
    assert op.line == f"{__file__}:{first + 7}"


def test_its_text_has_all_of_it(summary):
    text = str(summary)
    assert text.splitlines()[:3] == [
        "runs as plantune's plan, 2.00 times faster than eager",
        "Net, batch 2, infer, float32, cpu: x 2x3x8x8 float32",
        "0.500 of eager's time, 95 % interval 0.400 to 0.600",
    ]
    assert summary.headline == text.splitlines()[0]
    assert f"{summary.ours} by plantune's kernels" in text
    assert "1 by torch's, 1 view\n1 op for which plantune has no kernels:\n" in text
    assert summary.framework_ops[0].line in text
    assert repr(summary) == text


def test_without_a_race_it_says_how_to_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(choose.UNPLANNED, "cpu", EAGER)
    tuned = optimize(nn.Sequential(nn.Linear(2, 2)).eval(), torch.ones(1, 2))
    summary = tuned.summary()
    assert (summary.ratio, summary.ours) == (None, 0)
    assert summary.headline == (
        "runs as eager: no plan was raced; plantune.tune(module, *inputs) searches for the fastest "
        "one"
    )


def planned(module: nn.Module, x: Tensor, **fields: object) -> TunedModule:
    """Runs from a plan by hand that has other fields."""
    graph = optimize(module, x).pool().graph
    plan = hand_plan(graph, load_search_space("cpu"), network="Net", without=("winograd",))
    return optimize(module, x, plan=replace(plan, **fields))


def test_what_varied_too_much_is_not_said_to_be_faster_and_not_faster() -> None:
    """It said "0.470 of eager's time" and "not clearly faster than eager" one after the other."""
    wide = Attrs(ratio=0.47, ratio_low=0.137, ratio_high=1.607, baseline="eager", rivals="eager")
    tuned = planned(Net().eval(), torch.randn(2, 3, 8, 8), evidence=wide, route="eager")
    lines = str(tuned.summary()).splitlines()
    assert lines[0] == (
        "runs as eager: times varied too much to show that a plan is faster (best: 0.470 of its "
        "time, 95 % interval 0.137 to 1.607)"
    )
    assert not [line for line in lines[1:] if "of eager's time" in line]


def test_with_frozen_weights_it_names_the_way_that_runs_them() -> None:
    module, x = Net().eval(), torch.randn(2, 3, 8, 8)
    graph = optimize(module, x).pool().graph
    plan = hand_plan(graph, load_search_space("cpu"), network="Net", without=("winograd",))
    plan = replace(plan, evidence=EVIDENCE, frozen_route="torchscript")
    live, frozen = (optimize(module, x, plan=plan, frozen=each).summary() for each in (False, True))
    assert live.headline.startswith("runs as plantune's plan, 2.00 times faster")
    assert frozen.headline == "runs as torchscript: the plan says that it was faster"
    assert "in the plan's race: 0.500 of eager's time" in str(frozen)


def test_it_names_what_the_first_calls_chose() -> None:
    """A plan of another machine runs once it has been faster here; until then eager does."""
    planned = SimpleNamespace(
        call=LastCall("eager", "the plan is from another machine and has not been faster here"),
        pool=SimpleNamespace(match="compatible"),
    )
    plan = SimpleNamespace(route="program", origin="measured", evidence=EVIDENCE)
    runs = runs_of(planned)  # type: ignore[arg-type]
    assert headline_of(plan, runs) == (  # type: ignore[arg-type]
        "runs as eager: the plan is from another machine and has not been faster here"
    )
    told = headline_of(plan, replace(runs, how="planned"))  # type: ignore[arg-type]
    assert told == "runs as plantune's plan, 2.00 times faster than eager"


def test_of_a_predicted_plan_nothing_was_measured() -> None:
    plan = SimpleNamespace(route="program", origin="predicted", evidence=Attrs(predicted_ms=1.0))
    told = headline_of(plan, Runs("captured", ""))  # type: ignore[arg-type]
    assert told == "runs as plantune's plan: it was predicted, and nothing of it was measured"
