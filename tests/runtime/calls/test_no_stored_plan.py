"""Where no plan is stored: what runs, and what is said of it."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from plantune import load_model, optimize
from plantune.errors import NoPlan, WrongResult
from plantune.models.se_resnet9 import SEResNet9Fixup
from plantune.plans.guess import COMPILED, hand_plan
from plantune.plans.workload import Workload
from plantune.runtime.calls import choose
from plantune.runtime.calls.choose import NoStoredPlan

NAME = "se_resnet9_fixup"


class TestNoPlan:
    """The framework's kernels run, and the user knows."""

    TEXT = f"no plan for {NAME}, batch 1, infer, float32, cpu is stored"

    def test_it_says_so_and_what_to_do(self):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = load_model(NAME, batch=1)
            model(torch.randn(1, 3, 64, 64))
        assert model.plan.origin == "framework"
        (warning,) = caught
        text = str(warning.message)
        assert warning.category is NoStoredPlan
        assert warning.filename == __file__
        assert text.startswith(self.TEXT)
        assert "`plantune search --batch 1` finds one" in text

    def test_what_it_advises_finds_that_very_plan(self):
        options = {"in_channels": 11, "dtype": torch.float64, "mode": "train", "device": "cpu"}
        with pytest.warns(NoStoredPlan) as caught:
            wanted = load_model(NAME, batch=2, **options).pool().graph
        (command,) = re.findall("`plantune search (.*)`", str(caught[0].message))
        words = command.split()
        given = dict(zip(words[::2], words[1::2], strict=True))
        assert set(given) == {"--batch", "--in-channels", "--dtype", "--mode"}
        counts = int(given["--batch"]), int(given["--in-channels"])
        workload = Workload(NAME, *counts, given["--mode"], given["--dtype"])
        assert workload.graph.digest == wanted.digest

    def test_it_says_so_once(self):
        model = load_model(NAME, batch=1)
        with pytest.warns(NoStoredPlan):
            model(torch.randn(1, 3, 64, 64))
        model(torch.randn(1, 3, 64, 64))

    def test_silently_where_that_is_asked_for(self):
        model = load_model(NAME, batch=1, fallback="silent")
        assert model(torch.randn(1, 3, 64, 64)).shape == (1, 512, 2, 2)

    def test_as_an_error_where_that_is_asked_for(self):
        model = load_model(NAME, batch=1, fallback="error")
        with pytest.raises(NoPlan, match=self.TEXT):
            model(torch.randn(1, 3, 64, 64))

    def test_of_a_module_that_no_search_knows_nothing_is_said(self):
        module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
        model = optimize(module, torch.randn(1, 3, 8, 8), fallback="error")
        assert model.plan.origin == "framework"


class TestGuess:
    """Without a stored plan, one that estimates chose, where there is one."""

    @pytest.fixture(autouse=True)
    def guess(self, monkeypatch):
        def guessed(graph, space, *, network):
            plan = hand_plan(graph, space, network=network, without=COMPILED)
            return replace(plan, origin="guess")

        monkeypatch.setattr(choose, "guessed_plan", guessed)

    def families(self, model):
        return {choice.candidate.family for choice in model.plan.choices} - {"view"}

    def test_it_is_proved_and_runs(self, monkeypatch, close):
        proved = []
        monkeypatch.setattr(choose, "recheck", lambda checked, *_: proved.append(checked.plan))
        module, x = SEResNet9Fixup(3).eval(), torch.randn(1, 3, 64, 64)
        model = optimize(module, x)
        close(model(x), module(x))
        assert self.families(model) > {"framework"}
        assert proved == [model.plan]

    def test_where_it_cannot_run_the_frameworks_kernels_do(self, monkeypatch, close):
        def fails(graph, plan, *_):
            raise WrongResult("the output is off", 1.0, 0.1)

        monkeypatch.setattr(choose, "recheck", fails)
        module, x = SEResNet9Fixup(3).eval(), torch.randn(1, 3, 64, 64)
        model = optimize(module, x, fallback="error")
        close(model(x), module(x))
        assert self.families(model) == {"framework"}
