"""Plans for chips that are not here: built for them, ranked by guesses, never measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plantune.base.outcome import Rejected
from plantune.devices.cuda.build import Binary
from plantune.errors import BuildError, InvalidPlan
from plantune.graph.graph import Graph
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.kernels.conversions import conversion_cost
from plantune.kernels.family import Candidate
from plantune.kernels.resolved import ResolvedStep
from plantune.plans.checked_plan import check_plan
from plantune.plans.problem import Problem
from plantune.search import predict
from plantune.search.policy import FAILURES_MAX
from plantune.search.predict import Prediction, Predictor
from plantune.space.search_space import load_search_space


class Small(nn.Module):
    """A convolution with a residual, and one after a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(16, 16, 3, 1, 1, bias=False)
        self.conv2 = nn.Conv2d(16, 32, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.conv1(x) + x)
        return self.conv2(nn.functional.avg_pool2d(y, 2))


def problem(arch: str) -> tuple[Graph, Problem]:
    graph = extract(Small().half().eval(), TensorType((8, 16, 8, 8), "float16"))
    return graph, Problem.of(graph, arch, "small")


def binary(registers: int = 64, spilled: int = 0) -> Binary:
    log = (
        "ptxas info : Compiling entry function 'run' for 'sm_80'\n"
        f"0 bytes stack frame, {spilled} bytes spill stores, 0 bytes spill loads\n"
        f"ptxas info : Used {registers} registers, 1024 bytes smem\n"
    )
    return Binary("key", b"\x7fELF", log)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Candidate]:
    """What was built; every build succeeds at once."""
    seen: list[Candidate] = []

    def build(chosen: ResolvedStep, arch: object) -> Binary:
        seen.append(chosen.candidate)
        return binary()

    monkeypatch.setattr(predict, "build", build)
    return seen


def families(prediction: Prediction) -> set[str]:
    return {row.candidate.family for row in prediction.steps}


@pytest.mark.parametrize("arch", ["sm70", "sm90"])
def test_a_plan_is_compiled_for_a_chip_that_is_not_here(arch: str) -> None:
    (graph, wanted), space = problem(arch), load_search_space(arch)
    found = Predictor(graph, wanted, 300.0).run()
    steps = check_plan(found.plan, graph, space).steps
    assert (found.plan.origin, found.plan.problem.arch) == ("predicted", arch)
    assert [row.step.name for row in found.steps] == [step.name for step in steps]
    built = [row for row in found.steps if row.footprint is not None]
    assert len(built) == found.built > 0
    for row in built:
        assert row.footprint is not None
        assert 0 < row.footprint.registers <= 255
        assert 32 <= row.footprint.threads <= 1024
        assert row.estimate_us > 0
    guesses = sum(row.estimate_us for row in found.steps)
    assert guesses <= 1e3 * found.plan.evidence["predicted_ms"]
    assert "median_ms" not in found.plan.evidence


def test_only_what_the_cheapest_cover_needs_is_built(asked: list[Candidate]) -> None:
    found = Predictor(*problem("sm80"), 60.0).run()
    assert len(asked) == found.built <= len(found.steps)
    assert not found.rejected


def test_what_does_not_build_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(chosen: ResolvedStep, arch: object) -> Binary:
        if chosen.family.name == "implicit_gemm_conv":
            raise BuildError("no such header")
        return binary()

    monkeypatch.setattr(predict, "build", build)
    found = Predictor(*problem("sm80"), 60.0).run()
    assert "implicit_gemm_conv" not in families(found)
    assert {rejected.stage for _, _, rejected in found.rejected} == {"build"}
    tried: dict[str, int] = {}
    for step, _, _ in found.rejected:
        tried[step.signature] = tried.get(step.signature, 0) + 1
    assert max(tried.values()) <= FAILURES_MAX
    assert found.plan.evidence["rejected"] == len(found.rejected)


def test_a_kernel_that_spills_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    first: list[Candidate] = []

    def build(chosen: ResolvedStep, arch: object) -> Binary:
        if chosen.family.name == "implicit_gemm_conv":
            first.append(chosen.candidate)
        return binary(spilled=8 if chosen.candidate in first[:1] else 0)

    monkeypatch.setattr(predict, "build", build)
    found = Predictor(*problem("sm80"), 60.0).run()
    assert first
    assert "it spills 8 bytes" in found.rejected[0][2].reason
    assert all(row.candidate != first[0] for row in found.steps)


def test_wrong_numbers_on_a_later_gpu_reject_a_kernel(asked: list[Candidate]) -> None:
    wrong: list[Candidate] = []

    def check(step: object, candidate: Candidate) -> Rejected | None:
        if not wrong:
            wrong.append(candidate)
            return Rejected("numerics", "it is wrong")
        return None

    found = Predictor(
        *problem("sm80"), 60.0, check=check, numerics="checked on a GPU through PTX"
    ).run()
    assert found.rejected[0][1:] == (wrong[0], Rejected("numerics", "it is wrong"))
    assert found.plan.evidence["numerics"] == "checked on a GPU through PTX"


def test_kernels_that_there_was_no_time_to_check_are_counted(
    asked: list[Candidate], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(predict.time, "monotonic", lambda: now[0])

    def check(step: object, candidate: Candidate) -> Rejected | None:
        now[0] += 61.0
        return None

    found = Predictor(
        *problem("sm80"), 60.0, check=check, numerics="checked on a GPU through PTX"
    ).run()
    assert found.built > 1
    left = f", but for {found.built - 1} kernels"
    assert found.plan.evidence["numerics"] == "checked on a GPU through PTX" + left


def test_without_time_the_framework_runs_all(asked: list[Candidate]) -> None:
    found = Predictor(*problem("sm80"), 0.0).run()
    assert not asked
    assert families(found) <= {"framework", "view"}


def test_other_errors_are_not_rejections(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(chosen: ResolvedStep, arch: object) -> Binary:
        raise InvalidPlan("a fault of plantune")

    monkeypatch.setattr(predict, "build", build)
    with pytest.raises(InvalidPlan):
        Predictor(*problem("sm80"), 60.0).run()


def test_conversions_follow_the_memory_of_the_chip() -> None:
    slow, quick = (conversion_cost(load_search_space(name).arch) for name in ("sm75", "sm90"))
    assert quick.bytes_per_us / slow.bytes_per_us == pytest.approx(4800 / 320)
    assert conversion_cost(load_search_space("cpu").arch).launch_us == 4.0
