"""What `load_model` and `optimize` take, and what they refuse."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from plantune import Plan, TunedModule, load_model, optimize
from plantune.base.canonical import Attrs
from plantune.devices.machine import cpu_environment
from plantune.errors import (
    InvalidPlan,
    NoPlan,
    UnknownNetwork,
    UnsupportedDevice,
    UnsupportedModule,
)
from plantune.kernels.family import Candidate
from plantune.models.se_resnet9 import se_resnet9_fixup
from plantune.plans.database.exports import export_plans
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.proofs import remember_proof
from plantune.plans.guess import framework_plan
from plantune.space.search_space import load_search_space

NAME = "se_resnet9_fixup"


class TestArguments:
    def test_says_what_it_is(self):
        model = load_model(NAME, batch=2, fallback="silent")
        assert isinstance(model, TunedModule)
        assert not model.training
        assert model.pool().graph.inputs[0][1].shape == (2, 3, 64, 64)
        plan = model.plan
        assert (plan.problem.network, plan.problem.batch) == (NAME, 2)
        assert (plan.problem.mode, plan.problem.dtype) == ("infer", "float32")
        assert (plan.problem.arch, plan.origin) == ("cpu", "framework")

    def test_runs_every_step_of_its_own_by_the_framework(self):
        plan = load_model(NAME, batch=1, fallback="silent").plan
        families = {choice.candidate.family for choice in plan.choices}
        assert families == {"framework", "view"}

    def test_mode_train_trains(self):
        model = load_model(NAME, batch=1, mode="train", fallback="silent")
        assert model.training
        assert model.plan.problem.mode == "train"
        model(torch.randn(1, 3, 64, 64)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())

    def test_channels_and_dtype_are_the_references(self, close):
        model = load_model(NAME, batch=1, in_channels=5, dtype=torch.float64, fallback="silent")
        x = torch.randn(1, 5, 64, 64, dtype=torch.float64)
        assert model(x).dtype == torch.float64
        close(model(x), model.reference(x))

    def test_several_batches_share_one_set_of_parameters(self, close):
        """An actor and a learner; each size is one that the module was made for."""
        shared = load_model(NAME, batch=(1, 2), mode="train", fallback="silent")
        with PlanDatabase.open() as database:
            for batch, mode in ((1, "infer"), (2, "train")):
                graph = load_model(NAME, batch=batch, mode=mode, fallback="silent").pool().graph
                plan = framework_plan(graph, load_search_space("cpu"), network=NAME)
                database.put_plan(dataclasses.replace(plan, origin="measured"), cpu_environment())
                remember_proof(plan, cpu_environment())
        frames = torch.randn(2, 3, 64, 64)
        optimizer = torch.optim.SGD(shared.parameters(), 0.1)
        for _ in range(2):
            with torch.no_grad():
                close(shared(frames[:1]), shared.reference(frames[:1]))
            assert shared.last_call().how == "planned"
            optimizer.zero_grad()
            shared(frames).square().mean().backward()
            assert shared.last_call().how == "planned"
            optimizer.step()
        assert shared.stats().eager == 0
        assert "for (1, 3, 64, 64) and (2, 3, 64, 64)" in repr(shared)

    @pytest.mark.parametrize("batch", [0, -1, 1.0, "1", None, True, (), (2, 0), [1, None]])
    def test_batch_is_a_positive_integer(self, batch):
        with pytest.raises(ValueError, match="batch must be a positive integer, or"):
            load_model(NAME, batch=batch)

    @pytest.mark.parametrize("mode", ["eval", "", "Train", None])
    def test_mode_is_one_of_two(self, mode, images):
        with pytest.raises(ValueError, match="mode must be one of infer, train"):
            load_model(NAME, batch=1, mode=mode)
        with pytest.raises(ValueError, match="mode must be one of infer, train"):
            optimize(nn.ReLU(), images, mode=mode)

    @pytest.mark.parametrize("fallback", ["eager", "", None])
    def test_fallback_is_one_of_three(self, fallback, images):
        with pytest.raises(ValueError, match="fallback must be one of warn, error, silent"):
            load_model(NAME, batch=1, fallback=fallback)
        with pytest.raises(ValueError, match="fallback must be one of warn, error, silent"):
            optimize(nn.ReLU(), images, fallback=fallback)

    @pytest.mark.parametrize("device", ["cuda", "meta", torch.device("cuda", 1)])
    def test_a_device_without_plans_is_refused(self, device):
        with pytest.raises(UnsupportedDevice, match="no plan runs on device"):
            load_model(NAME, batch=1, device=device)

    def test_an_example_elsewhere_is_refused(self):
        with pytest.raises(UnsupportedDevice, match="no plan runs on device meta"):
            optimize(nn.ReLU(), torch.zeros(1, device="meta"))

    def test_an_unknown_network_is_named_with_the_known(self):
        with pytest.raises(UnknownNetwork, match="se_resnet9_fixup"):
            load_model("se_resnet9", batch=1)

    def test_what_cannot_be_traced_is_named_with_its_place(self, named, images):
        class Branching(nn.Module):
            def forward(self, x):
                return x if x.sum() > 0 else -x

        module = named(first=nn.Conv2d(3, 4, 3), odd=Branching())
        with pytest.raises(UnsupportedModule, match=r"odd.*value"):
            optimize(module, images)(images)

    @pytest.mark.parametrize("fault", ["missing", "unknown", "shape"])
    def test_weights_fit_exactly(self, fault):
        state = se_resnet9_fixup().state_dict()
        if fault == "missing":
            del state["stem.1.weight"]
        elif fault == "unknown":
            state["stem.2.weight"] = torch.zeros(1)
        else:
            state["stem.1.weight"] = torch.zeros(1)
        with pytest.raises(RuntimeError, match=r"stem\.[12]\.weight"):
            load_model(NAME, batch=1, weights=state)

    def test_a_file_of_weights_runs_no_code(self, tmp_path):
        torch.save(se_resnet9_fixup(), tmp_path / "whole.pt")
        with pytest.raises(Exception, match=r"[Ww]eights.only"):
            load_model(NAME, batch=1, weights=tmp_path / "whole.pt")

    def test_given_weights_are_copied(self):
        state = se_resnet9_fixup().state_dict()
        model = load_model(NAME, batch=1, weights=state)
        with torch.no_grad():
            model.stem[1].weight.zero_()
        assert state["stem.1.weight"].any()


class TestPlans:
    @pytest.fixture
    def plan(self, small, images, tuned):
        return tuned(small, images, plan="hand").plan

    def test_a_given_plan_is_the_one_that_runs(self, plan, small, images, monkeypatch):
        model = optimize(small, images, plan=plan)
        model(images)
        assert model.plan is plan
        with model.pool().lend() as instance:
            assert instance.program.plan is plan

    @pytest.mark.parametrize("given", [str, lambda path: path], ids=["str", "Path"])
    def test_a_plan_from_a_file(self, given, plan, small, images, tmp_path):
        path = tmp_path / "a plan.json"
        path.write_text(plan.dumps(), encoding="utf-8")
        model = optimize(small, images, plan=given(path))
        assert model.plan == plan
        assert torch.equal(model(images), optimize(small, images, plan=plan)(images))

    def test_a_plan_by_name(self, tmp_path):
        plan = load_model(NAME, batch=2, fallback="silent").plan
        path = tmp_path / "plan.json"
        path.write_text(plan.dumps(), encoding="utf-8")
        assert load_model(NAME, batch=2, plan=path).plan == plan

    def test_the_plan_is_found_in_an_exported_database(self, plan, small, images, tmp_path):
        plan = dataclasses.replace(plan, problem=dataclasses.replace(plan.problem, network="small"))
        with PlanDatabase.open(tmp_path / "all.db") as database:
            database.put_plan(plan, cpu_environment())
            export_plans(database, tmp_path / "cpu.db", "cpu")
        model = optimize(small, images, plan=tmp_path / "cpu.db")
        assert model.plan == plan
        assert torch.equal(model(images), optimize(small, images, plan=plan)(images))
        with pytest.raises(NoPlan, match=r"cpu\.db: has no plan for the layers"):
            optimize(small, images[:1], plan=tmp_path / "cpu.db")

    def test_a_file_that_is_none_is_refused_with_its_path(self, small, images, tmp_path):
        path = tmp_path / "plan.json"
        for text in (None, "", "{}", "[1]", "\0", '{"format": NaN}'):
            if text is not None:
                path.write_text(text, encoding="utf-8")
            with pytest.raises(InvalidPlan, match=r"plan\.json"):
                optimize(small, images, plan=path)

    @pytest.mark.parametrize("other", ["batch", "channels", "mode", "network"])
    def test_a_plan_for_something_else_is_refused_at_once(self, other):
        plan = load_model(NAME, batch=2, fallback="silent").plan
        options = {"batch": 2, "in_channels": 3, "mode": "infer"}
        options |= {
            "batch": {"batch": 3},
            "channels": {"in_channels": 4},
            "mode": {"mode": "train"},
            "network": {},
        }[other]
        with pytest.raises(InvalidPlan, match="for other layers"):
            load_model("resnet18" if other == "network" else NAME, plan=plan, **options)

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda p: {"problem": dataclasses.replace(p.problem, arch="sm90")}, "for sm90"),
            (lambda p: {"choices": p.choices[1:]}, "cover"),
            (lambda p: {"choices": (*p.choices, p.choices[0])}, "cover"),
            (lambda p: {"choices": _with(p, "nothing", {})}, "nothing"),
            (lambda p: {"choices": _with(p, "view", {})}, "view"),
            (lambda p: {"choices": _with(p, "framework", {"layout": "nhcw"})}, "search space"),
            (lambda p: {"choices": _with(p, "framework", {})}, "search space"),
        ],
        ids=["arch", "missing step", "step twice", "family", "illegal", "config", "no config"],
    )
    def test_a_plan_that_does_not_fit_is_refused_at_once(self, change, reason, plan, small, images):
        wrong = dataclasses.replace(plan, **change(plan))
        with pytest.raises(InvalidPlan, match=reason):
            optimize(small, images, plan=wrong)


def _with(plan: Plan, family: str, config: dict[str, object]) -> tuple[object, ...]:
    """The plan's choices, the first of which has another candidate."""
    first, *rest = plan.choices
    return (dataclasses.replace(first, candidate=Candidate(family, Attrs(config))), *rest)
