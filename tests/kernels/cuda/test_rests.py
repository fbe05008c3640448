"""Second halves of launches: what they touch, and that kernels have them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from plantune.graph.passes.differentiate import differentiate
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.kernels.cuda import launcher
from plantune.kernels.family import Frame
from plantune.models.registry import network
from plantune.plans.checked_plan import check_plan
from plantune.plans.guess import hand_plan
from plantune.runtime.program.schedule import make_schedule
from plantune.space.search_space import load_search_space


@pytest.fixture(scope="module")
def launches():
    """Those of a training plan by hand."""
    space = load_search_space("sm90")
    model = network("se_resnet9_fixup").build(3).half()
    graph = differentiate(extract(model, TensorType((2048, 3, 64, 64), "float16")))
    plan = hand_plan(graph, space, network="test")
    return make_schedule(check_plan(plan, graph, space)).launches


def test_they_make_gradients_of_weights_alone(launches):
    halved = [launch for launch in launches if launch.rest]
    families = {launch.candidate.family for launch in halved}
    assert families >= {"hopper_dgrad", "hopper_wgrad", "resident_dgrad", "se_grad"}
    for launch in halved:
        assert launch.rest <= launch.reads | launch.writes
        for name in launch.rest & launch.writes:
            assert len(launch.step.types[name].shape) < 4 or "wgrad" in name


def test_a_kernel_is_bound_in_halves_if_it_has_a_rest(launches, monkeypatch):
    monkeypatch.setattr(launcher, "Kernel", lambda *_: SimpleNamespace(written_for=(9, 0)))
    for launch in launches:
        workspace = torch.empty(launch.workspace_bytes, dtype=torch.uint8, device="meta")
        frame = Frame({}, workspace, built=object())
        binding = launch.family.bind(launch.parts, launch.candidate.config, frame)
        assert (binding.halves is not None) == bool(launch.rest), launch.step.name
