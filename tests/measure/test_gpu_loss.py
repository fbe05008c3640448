"""A GPU that is lost in the middle of a search is no candidate's fault, and ends it."""

from __future__ import annotations

import pytest

from plantune.base.canonical import Attrs
from plantune.base.jsonable import to_json
from plantune.base.outcome import Rejected
from plantune.errors import MeasureTimeout, UnsupportedDevice, WorkerDied, WorkerFailed
from plantune.graph.graph import Graph
from plantune.graph.types import TensorType
from plantune.kernels.family import Candidate
from plantune.measure.subject import Raced
from plantune.measure.worker import client
from plantune.measure.worker.client import Worker
from plantune.plans.guess import framework_plan
from plantune.plans.workload import Workload
from plantune.space.search_space import load_search_space

FRAMEWORK = Candidate("framework", Attrs(layout="nchw"))
CRASH = Rejected("crash", "CUDA error: uncorrectable ECC error encountered")
LOST = [
    WorkerDied("no CUDA-capable device is detected"),
    UnsupportedDevice("sm90 needs a GPU of compute capability 9.0; torch sees no CUDA GPU here"),
    WorkerFailed("the measuring worker failed:\nRuntimeError"),
    MeasureTimeout("start took over 60 s; the worker was killed"),
]


class FakeChild:
    """A process that answers with `answer`, and whose first work on the GPU ends in `lost`."""

    answer: object = None
    lost: BaseException | None = None
    made: list[FakeChild]

    def __init__(self, *_: object) -> None:
        self.asked: list[str] = []
        self.alive = True
        self.pid = 1
        FakeChild.made.append(self)

    def ask(self, request, limits_s, cut_at=None):
        self.asked.append(request["do"])
        wanted = self.lost if request["do"] == "warm_up" else self.answer
        if isinstance(wanted, BaseException):
            raise wanted
        return wanted

    def end(self) -> None:
        self.alive = False

    kill = end


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(client, "Child", FakeChild)
    monkeypatch.setattr(FakeChild, "made", [], raising=False)
    for name in ("answer", "lost"):
        monkeypatch.setattr(FakeChild, name, None)
    return FakeChild


@pytest.fixture
def step(step_of):
    return step_of(lambda b: b.emit("relu", b.input("x", TensorType((2, 3, 5, 7)))))


@pytest.fixture
def plan(step, space):
    graph = Graph(step.inputs, (), (), step.nodes, ("relu",))
    return graph, framework_plan(graph, load_search_space("sm90"), network="small")


DEADLY = [
    to_json(CRASH),
    WorkerDied("the worker died during check: SIGABRT"),
    MeasureTimeout("check took over 60 s; the worker was killed"),
]


@pytest.mark.parametrize("answer", DEADLY)
@pytest.mark.parametrize("lost", LOST)
def test_where_a_new_process_cannot_use_it_the_search_ends(fake, step, answer, lost):
    fake.answer, fake.lost = answer, lost
    with Worker(threads=1) as worker:
        with pytest.raises(UnsupportedDevice, match="the GPU for sm90 no longer responds"):
            worker.check_and_time(step, FRAMEWORK, "sm90")
        assert [child.asked for child in fake.made] == [["check_and_time"], ["warm_up"]]
        assert not any(child.alive for child in fake.made)


@pytest.mark.parametrize("answer", DEADLY)
def test_where_it_can_the_candidate_is_rejected(fake, step, answer):
    fake.answer = answer
    with Worker(threads=1) as worker:
        outcome = worker.check_and_time(step, FRAMEWORK, "sm90")
        assert isinstance(outcome, Rejected)
        assert outcome.stage in ("crash", "timeout")
        assert [child.asked for child in fake.made] == [["check_and_time"], ["warm_up"]]
        worker.check_and_time(step, FRAMEWORK, "sm90")
        assert fake.made[1].asked == ["warm_up", "check_and_time"]


@pytest.mark.parametrize("stage", ["build", "numerics", "memory", "roofline", "noisy"])
def test_other_rejections_prove_nothing(fake, step, stage):
    fake.answer = to_json(Rejected(stage, "a reason"))
    fake.lost = LOST[0]
    with Worker(threads=1) as worker:
        assert worker.check_and_time(step, FRAMEWORK, "sm90") == Rejected(stage, "a reason")


def test_a_cpu_is_not_lost(fake, step):
    fake.answer, fake.lost = DEADLY[1], LOST[0]
    with Worker(threads=1) as worker:
        assert worker.check_and_time(step, FRAMEWORK, "cpu").stage == "crash"
        assert [child.asked for child in fake.made] == [["check_and_time"]]


@pytest.mark.parametrize("answer", DEADLY[1:])
@pytest.mark.parametrize("what", ["time_programs", "race"])
def test_in_the_ranking_and_in_the_race(fake, plan, answer, what):
    graph, made = plan

    def ask(worker):
        if what == "race":
            return worker.race(
                Raced(Workload("se_resnet9_fixup", 1, arch="sm90").problem), made, ("eager",)
            )
        return worker.time_programs(graph, [made])

    fake.answer = answer
    with Worker(threads=1) as worker, pytest.raises(type(answer)):
        ask(worker)
    fake.lost = LOST[0]
    with Worker(threads=1) as worker, pytest.raises(UnsupportedDevice, match="see nvidia-smi"):
        ask(worker)


def test_an_interrupt_while_it_is_proved_leaves_no_process(fake, step):
    fake.answer, fake.lost = DEADLY[0], KeyboardInterrupt()
    with Worker(threads=1) as worker:
        with pytest.raises(KeyboardInterrupt):
            worker.check_and_time(step, FRAMEWORK, "sm90")
        assert not any(child.alive for child in fake.made)
