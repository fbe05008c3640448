from __future__ import annotations

import pytest
import torch

from plantune.graph.passes.differentiate import differentiate
from plantune.graph.tracing.arguments import Arguments
from plantune.graph.tracing.extract import extract_with_outputs
from plantune.graph.types import TensorType
from plantune.models.se_resnet9 import SEResNet9Fixup
from plantune.plans.checked_plan import check_plan
from plantune.plans.guess import hand_plan
from plantune.space.search_space import load_search_space


@pytest.mark.parametrize("trains", [False, True])
def test_no_step_stores_in_float32_what_readers_take_in_16_bits(trains):
    """Fixup's scalars are float32 under autocast: what convolutions make is widened for them."""
    arguments = Arguments((TensorType((64, 3, 64, 64)),), autocast=("cuda", torch.float16))
    graph = extract_with_outputs(SEResNet9Fixup(3).train(trains), arguments)[0]
    graph = differentiate(graph) if trains else graph
    plan = hand_plan(graph, load_search_space("sm90"), network="x")
    steps = check_plan(plan, graph, load_search_space("sm90")).partition
    convolutions = [s for s in steps if s.ops[0] in ("conv2d", "conv2d_dgrad")]
    assert len(convolutions) >= 8
    for step in convolutions:
        last = step.nodes[-1]
        widened = last.op == "cast" and len(step.nodes) == 2
        assert not widened or last.name in graph.results
