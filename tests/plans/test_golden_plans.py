"""What the reference networks run by where nothing was measured: the families of each plan and how
many steps each takes, so that no change of the code moves them unseen.

If a family or a cost changes on purpose, the file follows it, and the commit says why.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from plantune.plans.guess import guessed_plan
from plantune.plans.workload import Workload
from plantune.space.search_space import load_search_space

PLANS: dict[str, dict[str, int]] = json.loads(
    (Path(__file__).parent / "golden_plans.json").read_text("utf-8")
)
BATCH = 32


@pytest.mark.parametrize("key", PLANS)
def test_a_guess_is_the_stored_one(key: str) -> None:
    network, mode, arch = key.split()
    graph = Workload(network, BATCH, 3, mode, "float16", arch).graph
    plan = guessed_plan(graph, load_search_space(arch), network=network)
    assert plan is not None
    assert Counter(choice.candidate.family for choice in plan.choices) == PLANS[key]
