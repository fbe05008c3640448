"""What NCHW filters cost beside channels_last, as bytes and by the datasheet."""

from __future__ import annotations

import pytest

from plantune.plans.guess import framework_plan, hand_plan
from plantune.plans.workload import Workload
from plantune.report.packing import LAUNCH_US, packing_of, packing_text
from plantune.report.steps import plan_steps
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

SM90 = Workload("resnet18", 16, 3, "infer", "float16", "sm90")


def test_each_filter_of_more_than_a_pixel_and_a_channel_counts_once() -> None:
    plan = hand_plan(SM90.graph, load_search_space("sm90"), network=SM90.network)
    packing = packing_of(plan_steps(plan, SM90.graph), load_arch("sm90"))
    assert packing is not None
    weights = [type_ for _, type_ in SM90.graph.parameters if len(type_.shape) == 4]
    most = [type_ for type_ in weights if type_.shape[1] > 1 and type_.shape[2] > 1]
    assert len(most) - 1 <= packing.filters <= len(most)  # the stem may have an order of its own
    assert packing.size_bytes <= sum(type_.size_bytes for type_ in most)
    # 22 MB are read and written at 4800 GB/s.
    assert packing.us == pytest.approx(LAUNCH_US + 2 * packing.size_bytes / 4.8e6)
    assert f"{packing.filters} filters, " in packing_text(packing)


def test_the_framework_packs_nothing() -> None:
    plan = framework_plan(SM90.graph, load_search_space("sm90"), network=SM90.network)
    assert packing_of(plan_steps(plan, SM90.graph), load_arch("sm90")) is None
