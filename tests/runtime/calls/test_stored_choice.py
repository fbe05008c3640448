"""Which stored plan is taken, and what is said of it: F31, F32, F34 and F41."""

from __future__ import annotations

import textwrap
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from plantune import load_model, optimize
from plantune.base.canonical import Attrs
from plantune.devices.machine import cpu_environment
from plantune.errors import (
    BuildError,
    CannotJudge,
    CudaError,
    IllegalCandidate,
    NoPlan,
    WrongResult,
)
from plantune.kernels import torch_ops
from plantune.models.se_resnet9 import SEResNet9Fixup
from plantune.plans import raced_routes
from plantune.plans.database.exports import export_plans
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.proofs import remember_proof
from plantune.plans.guess import COMPILED, framework_plan, hand_plan
from plantune.runtime.calls import choose
from plantune.runtime.calls.choose import NoStoredPlan
from plantune.space.search_space import load_search_space

NAME = "se_resnet9_fixup"


@pytest.fixture(scope="module")
def plan():
    graph = load_model(NAME, batch=1, fallback="silent").pool().graph
    return hand_plan(graph, load_search_space("cpu"), network=NAME, without=COMPILED)


@pytest.fixture
def store(plan):
    def put(**changes):
        environment = replace(cpu_environment(), **changes)
        with PlanDatabase.open() as database:
            return database.put_plan(
                replace(plan, problem=replace(plan.problem, arch=environment.arch)), environment
            )

    return put


@pytest.fixture
def proved(monkeypatch):
    """The plans that are proved from now on."""
    plans, recheck = [], choose.recheck

    def note(checked, *arguments):
        plans.append(checked.plan)
        recheck(checked, *arguments)

    monkeypatch.setattr(choose, "recheck", note)
    return plans


def loaded():
    """The module, and what was said of its plan."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = load_model(NAME, batch=1)
        model(torch.randn(1, 3, 64, 64))
    return model, [(item.category, str(item.message)) for item in caught]


def test_a_plan_of_this_machine_runs_without_a_word(store, plan):
    store()
    model, said = loaded()
    assert model.plan == plan
    assert said == []


@pytest.mark.parametrize(
    "change",
    [{"torch": "2.0.0"}, {"plantune": "0.0.1"}, {"threads": 999}, {"compiler": "g++-4"}],
    ids=str,
)
def test_a_plan_of_other_versions_is_proved_and_runs_without_a_word(store, plan, proved, change):
    store(**change)
    model, said = loaded()
    assert (model.plan, said) == (plan, [])
    assert proved == [plan]


class TestProof:
    """Whatever a file claims, a plan is used after it computed the network here, once."""

    def test_one_that_claims_this_very_machine_is_proved_too(self, store, plan, proved):
        store()
        loaded()
        assert proved == [plan]

    def test_once_for_all_modules_and_processes(self, store, python, proved, copied_processes):
        store()
        for _ in range(2):
            loaded()
        assert len(proved) == 1
        code = """
            import torch, plantune
            from plantune.runtime.calls import choose
            choose.recheck = None  # calling it would be an error
            model = plantune.load_model("se_resnet9_fixup", batch=1, fallback="error")
            assert model(torch.randn(1, 3, 64, 64)).shape == (1, 512, 2, 2)
            assert not model.plan.is_unsearched
        """
        done = python(textwrap.dedent(code))
        assert done.returncode == 0, done.stderr

    def test_a_given_plan_is_proved_too(self, plan, proved):
        for _ in range(2):
            load_model(NAME, batch=1, plan=plan)
        assert proved == [plan]

    def test_a_given_plan_that_is_wrong_is_an_error(self, plan, monkeypatch):
        def write(node, y):
            return lambda a, b: torch.mul(a, b, out=y).mul_(1.01)

        monkeypatch.setitem(torch_ops.WRITERS, "mul", write)
        with pytest.raises(WrongResult, match="output 0 is off by"):
            load_model(NAME, batch=1, plan=plan)

    def test_what_was_measured_here_is_not_proved_again(self, store, plan, proved):
        store()
        remember_proof(plan, cpu_environment())
        assert loaded()[0].plan == plan
        assert proved == []

    @pytest.mark.parametrize("change", [{"torch": "2.0.0"}, {"device": "A CPU"}], ids=str)
    def test_a_proof_of_another_environment_does_not_count(self, store, plan, proved, change):
        store()
        remember_proof(plan, replace(cpu_environment(), **change))
        loaded()
        assert proved == [plan]

    def test_a_proof_of_another_plan_does_not_count(self, store, plan, proved):
        store()
        remember_proof(replace(plan, evidence=Attrs(note="another")), cpu_environment())
        loaded()
        assert proved == [plan]

    def test_one_that_fails_is_tried_again_and_never_used(self, store, monkeypatch):
        store()

        def fails(*_):
            raise CannotJudge("the framework itself overflows")

        monkeypatch.setattr(choose, "recheck", fails)
        for _ in range(2):
            model, said = loaded()
            assert model.plan.origin == "framework"
            ((kind, text),) = said
            assert kind is NoStoredPlan
            assert "cannot run here: the framework itself overflows; a guessed plan" in text

    def test_a_plan_that_runs_eagerly_needs_none(self, store, proved, monkeypatch, plan):
        with PlanDatabase.open() as database:
            database.put_plan(replace(plan, route="eager"), cpu_environment())
        loaded()
        assert proved == []


class TestLoss:
    """A plan that lost to torch.compile says so once, and runs all the same."""

    @pytest.fixture
    def lost(self, plan, monkeypatch):
        monkeypatch.setattr(choose, "_reported", set())
        evidence = Attrs({raced_routes.LOST_TO: "compile-default", raced_routes.LOSS: 1.25})
        lost = replace(plan, evidence=evidence)
        with PlanDatabase.open() as database:
            database.put_plan(lost, cpu_environment())
        remember_proof(lost, cpu_environment())
        return lost

    def test_it_is_said_once(self, lost):
        model, ((kind, text),) = loaded()
        assert model.plan == lost
        assert kind is choose.LosingPlan
        assert ", batch 1, infer, float32, cpu: compile-default was faster: " in text
        assert "a call takes 1.25 of its time" in text
        assert loaded()[1] == []

    @pytest.mark.usefixtures("lost")
    def test_not_where_nothing_is_to_be_said(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load_model(NAME, batch=1, fallback="silent")(torch.randn(1, 3, 64, 64))


class TestThreads:
    """A plan is for a number of threads: with another one it is right, and no exact match."""

    @pytest.fixture(autouse=True)
    def threads(self):
        before = torch.get_num_threads()
        yield
        torch.set_num_threads(before)

    def test_the_number_of_now_counts(self):
        torch.set_num_threads(1)
        one = cpu_environment()
        torch.set_num_threads(3)
        assert (one.threads, cpu_environment().threads) == (1, 3)
        assert cpu_environment().match(one) == "compatible"

    def test_another_number_looks_for_another_plan(self, store, plan):
        torch.set_num_threads(2)
        store()
        other = replace(plan, evidence=Attrs(note="for one thread"))
        torch.set_num_threads(1)
        with PlanDatabase.open() as database:
            database.put_plan(other, cpu_environment())
        model, x = load_model(NAME, batch=1), torch.randn(1, 3, 64, 64)
        for number, wanted in ((1, other), (2, plan), (1, other)):
            torch.set_num_threads(number)
            assert model(x).isfinite().all()
            assert (model.plan, model.pool().match) == (wanted, "exact")

    def test_without_one_for_the_number_it_is_not_an_exact_match(self, store, plan, close):
        torch.set_num_threads(2)
        store()
        model, x = load_model(NAME, batch=1), torch.randn(1, 3, 64, 64)
        assert model.pool().match == "exact"
        torch.set_num_threads(1)
        close(model(x), model.reference(x))
        assert (model.plan, model.pool().match) == (plan, "compatible")


class Renamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy = SEResNet9Fixup(3)

    def forward(self, x):
        return self.policy(x)


def exported(path):
    with PlanDatabase.open() as database:
        export_plans(database, path, "cpu")


class TestAnyModule:
    """What a search found serves each module of the same layers."""

    def test_it_runs_from_the_plan_of_a_known_network(self, store, plan, close):
        store()
        module, x = SEResNet9Fixup(3).eval(), torch.randn(1, 3, 64, 64)
        model = optimize(module, x)
        assert model.plan == plan
        close(model(x), module(x))

    def test_other_names_of_its_layers_do_not_matter(self, store, plan, proved, close, tmp_path):
        """Whether it is stored or given, as JSON or as an exported file."""
        store()
        renamed, x = Renamed().eval(), torch.randn(1, 3, 64, 64)
        given = {"plan.json": lambda path: path.write_text(plan.dumps()), "cpu.db": exported}
        for name, write in given.items():
            write(tmp_path / name)
        for path in (None, *(tmp_path / name for name in given)):
            model = optimize(renamed, x, plan=path)
            families = [choice.candidate for choice in model.plan.choices]
            assert families == [choice.candidate for choice in plan.choices]
            assert all(n.startswith("policy.") for c in model.plan.choices for n in c.nodes)
            close(model(x), renamed(x))
        assert len(proved) == 1

    def test_with_other_layers_it_does_not(self, store):
        store()
        model = optimize(SEResNet9Fixup(3, base_planes=16).eval(), torch.randn(1, 3, 64, 64))
        assert model.plan.origin == "framework"

    def test_of_a_plan_for_another_chip_nothing_is_said(self, store):
        """Else what others keep in one database would decide whether a call is an error."""
        store(arch="sm90", device="NVIDIA H200")
        model = optimize(SEResNet9Fixup(3).eval(), torch.randn(1, 3, 64, 64), fallback="error")
        assert model.plan.origin == "framework"

    def test_a_given_plan_is_for_its_own_layers_alone(self, plan, close):
        x = torch.randn(1, 3, 64, 64)
        model = optimize(SEResNet9Fixup(3).eval(), x, plan=plan)
        conv = model.get_submodule("layers.1.0.conv1")
        conv.dilation = conv.padding = (2, 2)
        close(model(x), model.reference(x))
        assert model.plan.origin == "framework"

    def test_a_given_plan_comes_first(self, store):
        store()
        module, x = SEResNet9Fixup(3).eval(), torch.randn(1, 3, 64, 64)
        graph = optimize(module, x).pool().graph
        given = framework_plan(graph, load_search_space("cpu"), network="given")
        assert optimize(module, x, plan=given).plan == given


def test_a_plan_for_another_chip_is_refused_with_expected_and_got(store):
    """F32."""
    number = store(arch="sm90", device="NVIDIA H200")
    model, said = loaded()
    assert model.plan.origin == "framework"
    ((kind, text),) = said
    assert kind is NoStoredPlan
    assert f"plan {number} is for another chip: expected cpu, got sm90 (NVIDIA H200)" in text


def test_one_for_another_chip_is_an_error_where_that_is_asked_for(store):
    store(arch="sm90", device="NVIDIA H200")
    with pytest.raises(NoPlan, match="expected cpu, got sm90"):
        load_model(NAME, batch=1, fallback="error").pool()


def test_beside_one_that_fits_it_is_not_mentioned(store, plan):
    store(arch="sm90", device="NVIDIA H200")
    store()
    model, said = loaded()
    assert (model.plan, said) == (plan, [])


@pytest.mark.parametrize(
    "error",
    [
        BuildError("no NVRTC here compiles for sm70"),
        CudaError("cuModuleLoadData failed with 222: provided PTX was compiled with ..."),
        IllegalCandidate("cuDNN 9.1 does not offer 'eng7'"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_plan_that_cannot_run_any_more_is_passed_over(store, monkeypatch, error):
    """Libraries changed since, or less memory is free."""
    number = store()
    lend = choose.ProgramPool.lend

    def fails(pool):
        if not pool.plan.is_unsearched:
            raise error
        return lend(pool)

    monkeypatch.setattr(choose.ProgramPool, "lend", fails)
    model, said = loaded()
    assert model.plan.origin == "framework"
    ((kind, text),) = said
    assert kind is NoStoredPlan
    assert f"the stored plan {number} cannot run here" in text
    assert str(error) in text
    with pytest.raises(NoPlan, match="cannot run here") as raised:
        load_model(NAME, batch=1, fallback="error").pool()
    assert raised.value.__context__ is None  # which would keep the memory of what failed
