"""Numbers of kernels for another arch, checked on the processor that is here."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from plantune.base.canonical import Attrs
from plantune.base.outcome import Rejected
from plantune.devices.device import CPU
from plantune.errors import BuildError, UnsupportedDevice
from plantune.graph.builder import GraphBuilder
from plantune.graph.step import Step
from plantune.graph.types import TensorType
from plantune.kernels.family import Candidate, KernelFamily
from plantune.kernels.registry import all_families
from plantune.measure.numerics import check
from plantune.measure.worker import work
from plantune.measure.worker.client import Limits, Worker
from plantune.space.search_space import SearchSpace

pytestmark = pytest.mark.usefixtures("copied_processes")

FRAMEWORK = Candidate("framework", Attrs(layout="nchw"))


def relu(builder: GraphBuilder) -> tuple[str, ...]:
    return builder.emit("relu", builder.input("x", TensorType((2, 3, 4, 4))))


@pytest.fixture
def portable(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """For which archs something was built to run elsewhere."""
    seen: list[str] = []

    def build_portable(step: object, config: object, arch: object) -> None:
        seen.append(arch.name)  # type: ignore[attr-defined]

    monkeypatch.setattr(all_families()["framework"], "build_portable", build_portable)
    return seen


def test_a_check_elsewhere_runs_what_is_portable(
    step_of: Callable[..., Step], space: SearchSpace, portable: list[str]
) -> None:
    assert check(step_of(relu), FRAMEWORK, space).error == 0
    assert portable == []
    assert check(step_of(relu), FRAMEWORK, space, device=CPU).error == 0
    assert portable == ["cpu"]


def test_the_worker_says_what_is_wrong(
    step_of: Callable[..., Step],
    fake: type[KernelFamily],
    monkeypatch: pytest.MonkeyPatch,
    register: Callable[..., None],
) -> None:
    monkeypatch.setattr(work, "later_gpu", lambda arch: CPU)
    step = step_of(relu)
    stages: list[str] = []
    assert work.check_elsewhere(stages.append, step, FRAMEWORK, "cpu", (0, 1)) is None
    assert stages == ["build", "check"]

    def spoil(step: Step, frame: object) -> None:
        frame.values[step.nodes[-1].name].add_(1)  # type: ignore[attr-defined]

    wrong = fake(spoil)  # type: ignore[call-arg]
    register(fake=wrong)
    candidate = Candidate("fake", Attrs())
    outcome = work.check_elsewhere(stages.append, step, candidate, "cpu", (0, 1))
    assert outcome is not None
    assert outcome.stage == "numerics"

    def build_portable(step: object, config: object, arch: object) -> None:
        raise BuildError("no such header")

    wrong.build_portable = build_portable  # type: ignore[assignment,method-assign]
    outcome = work.check_elsewhere(stages.append, step, candidate, "cpu", (0, 1))
    assert outcome == Rejected("build", "no such header")


def test_without_a_later_gpu_nothing_is_checked(step_of: Callable[..., Step]) -> None:
    with Worker(threads=1, limits=Limits(run_s=30)) as own, pytest.raises(UnsupportedDevice):
        own.check_elsewhere(step_of(relu), FRAMEWORK, "cpu")
