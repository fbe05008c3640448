"""The worker through its client, with kernels that misbehave."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.base.outcome import Measured, Outcome, Rejected
from plantune.devices.cuda.flags import planned_for
from plantune.errors import IllegalCandidate, MeasureTimeout, OutOfTime, WorkerDied, WorkerFailed
from plantune.graph.graph import Graph
from plantune.graph.step import Step
from plantune.graph.types import TensorType
from plantune.kernels.family import Candidate
from plantune.measure.timing import Effort
from plantune.measure.worker.client import Limits, Worker
from plantune.measure.worker.protocol import Channel

pytestmark = pytest.mark.usefixtures("copied_processes")
HERE = Path(__file__).parents[1]
# On a busy machine, what ends by itself may take any time; only what never ends is cut short.
LIMITS = Limits(build_s=120, run_s=120, memory_bytes=256 << 20)
SHORT_LIMITS = replace(LIMITS, build_s=2, run_s=4)
# Patient, because other tests may run beside this one.
EFFORT = Effort(budget_s=0.03, warm_up_s=0.01, retries=20)
FRAMEWORK = Candidate("framework", Attrs(layout="nchw"))


def faulty(fault: str) -> Candidate:
    return Candidate("faulty", Attrs(fault=fault))


# Workers know the family of faulty_kernels.py; this process does not.
FAMILIES = {"PLANTUNE_FAMILIES": "faulty_kernels", "PYTHONPATH": str(HERE)}


@pytest.fixture(scope="module")
def worker(copied_processes: None) -> Iterator[Worker]:
    with Worker(threads=1, limits=LIMITS, environment=FAMILIES) as worker:
        yield worker


@pytest.fixture
def relu(step_of: Callable[..., Step]) -> Step:
    return step_of(lambda b: b.emit("relu", b.input("x", TensorType((2, 3, 5, 7)))))


def test_it_tells_its_stages(worker, relu):
    stages = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "on_stage", stages.append)
        worker.check_and_time(relu, FRAMEWORK, "cpu", EFFORT)
    assert stages == ["build", "check", "time", "idle"]


@pytest.fixture
def ask(worker: Worker, relu: Step, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Outcome]:
    def run(fault: str) -> Outcome:
        limits = SHORT_LIMITS if "endless" in fault else LIMITS
        monkeypatch.setattr(worker, "limits", limits)
        return worker.check_and_time(relu, faulty(fault), "cpu", EFFORT)

    return run


def is_good(outcome: Outcome) -> bool:
    """Measured, with the error of a right kernel and a time."""
    return (
        isinstance(outcome, Measured)
        and outcome.error <= outcome.bound
        and 0 < outcome.low_us <= outcome.median_us <= outcome.high_us
    )


def test_a_good_kernel_is_measured(worker, relu, ask):
    assert is_good(ask("none"))
    outcome = worker.check_and_time(relu, FRAMEWORK, "cpu", EFFORT)
    assert is_good(outcome)
    assert outcome.deterministic
    assert outcome.cache == "cold"


FAULTS = {
    "wrong": ("numerics", "relative error 0.01"),  # other wrong ones are in test_numerics.py
    "build_error": ("build", "expected ';'"),
    "build_endless": ("timeout", "build took over 2 s"),
    "build_memory": ("memory", "MemoryError"),
    "memory": ("memory", "you tried to allocate"),
    "segfault": ("crash", "died during check: SIGSEGV"),
    "exits": ("crash", "SystemExit: 0"),
    "generator_exits": ("crash", "GeneratorExit: a generator ended"),
    "abort": ("crash", "SIGABRT; it printed:\nthe reason is here"),
    "endless_with_lock": ("timeout", "check took over 4 s"),
    "garbage": ("crash", "the worker sent garbage during check"),
    "closes": ("crash", "it closed its pipe"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_kernel_is_rejected_and_the_next_one_measured(ask, fault):
    stage, reason = FAULTS[fault]
    outcome = ask(fault)
    assert isinstance(outcome, Rejected)
    assert outcome.stage == stage
    assert reason in outcome.reason
    assert len(outcome.reason) < 5000
    assert is_good(ask("none"))


def test_what_a_kernel_prints_disturbs_nothing(ask, worker, capfd):
    worker.start()
    pid = worker.pid
    assert is_good(ask("prints"))
    assert worker.pid == pid
    assert capfd.readouterr() == ("", "")


def test_a_kernel_that_is_too_fast_is_rejected(worker, step_of):
    """Right while it is checked, then it does nothing any more."""
    step = step_of(
        lambda b: b.emit(
            "matmul",
            b.input("a", TensorType((384, 384))),
            b.parameter("b", TensorType((384, 384))),
            transpose_a=False,
            transpose_b=False,
        )
    )
    outcome = worker.check_and_time(step, faulty("idle"), "cpu", EFFORT)
    assert isinstance(outcome, Rejected)
    assert outcome.stage == "roofline"
    assert "less than any kernel can take here" in outcome.reason
    honest = worker.check_and_time(step, faulty("none"), "cpu", EFFORT)
    assert isinstance(honest, Measured)


def test_a_mistake_in_a_family_is_raised(ask):
    with pytest.raises(WorkerFailed, match="KeyError: 'a mistake of whoever wrote this family'"):
        ask("bug")
    assert is_good(ask("none"))


def test_a_request_that_is_cut_off_blames_nobody(worker, relu, ask):
    """It is no outcome of the candidate: another time there may be time for it."""
    cut = replace(EFFORT, cut_at=time.monotonic() + 0.5)
    with pytest.raises(OutOfTime, match="check was cut off: the time for it was over"):
        worker.check_and_time(relu, faulty("endless"), "cpu", cut)
    assert worker.pid is None
    assert is_good(ask("none"))


@pytest.mark.usefixtures("fresh_processes")
def test_a_worker_that_starts_too_late_is_cut_off(relu):
    late = replace(EFFORT, cut_at=time.monotonic() + 0.01)
    with pytest.raises(OutOfTime, match="before the measuring worker started"):
        Worker(threads=1).check_and_time(relu, FRAMEWORK, "cpu", late)


def test_an_illegal_candidate_is_raised(worker, relu):
    candidate = Candidate("onednn_conv", Attrs(layout="nchw", prepack=True))
    with pytest.raises(IllegalCandidate, match="onednn_conv at step 'relu': the step starts"):
        worker.check_and_time(relu, candidate, "cpu", EFFORT)
    with pytest.raises(IllegalCandidate, match="no kernel family is called 'nobody'"):
        worker.check_and_time(relu, Candidate("nobody", Attrs()), "cpu", EFFORT)


def test_a_worker_that_died_idle_is_replaced(worker, ask, eventually, is_gone):
    worker.start()
    pid = worker.pid
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: is_gone(pid), "it is not killed")
    assert is_good(ask("none"))


def test_ctrl_c_is_the_parents_to_decide(worker, ask):
    worker.start()
    pid = worker.pid
    os.kill(pid, signal.SIGINT)
    assert is_good(ask("none"))
    assert worker.pid == pid


def test_an_interrupted_request_leaves_no_worker(worker, ask, eventually, is_gone):
    worker.start()
    pid = worker.pid

    def interrupt():
        eventually(worker._lock.locked, "nothing is asked")
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        ask("endless")
    interrupter.join()
    eventually(lambda: is_gone(pid), "the worker goes on")
    assert is_good(ask("none"))


def test_the_parent_stays_as_it_was(worker, ask):
    """Its generator, its threads and its numbers are its own."""
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    product = torch.ones(64, 64) @ torch.ones(64, 64)
    ask("segfault")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.ones(64, 64) @ torch.ones(64, 64), product)


@pytest.mark.usefixtures("fresh_processes")
def test_the_worker_is_spawned_and_nothing_is_left_on_closing(monkeypatch, is_gone):
    """A process of its own, not a copy of this one."""

    def fork() -> int:
        raise AssertionError("forked")

    monkeypatch.setattr(os, "fork", fork)
    before = set(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    with Worker(threads=1) as worker:
        pid = worker.pid
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        assert command[0] == sys.executable.encode()
        assert b"plantune.measure.worker.worker_process" in command
        assert os.getpgid(pid) == pid != os.getpgid(0)
    assert multiprocessing.active_children() == []
    assert worker.pid is None
    assert is_gone(pid)
    assert set(os.listdir("/proc/self/fd")) <= before
    assert threading.active_count() == threads
    worker.close()


@pytest.mark.usefixtures("fresh_processes")
def test_a_worker_that_cannot_start_is_an_error(monkeypatch, relu):
    with pytest.raises(WorkerDied, match="took too long"):
        Worker(threads=1, limits=Limits(start_s=0.01)).check_and_time(relu, FRAMEWORK, "cpu")
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(WorkerDied, match=r"did not start.*/no/such/python"):
        Worker(threads=1).start()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(WorkerDied, match="did not start: exit code 1"):
        Worker(threads=1).start()


PARENT = """
import sys
from plantune.graph.builder import GraphBuilder
from plantune.graph.step import make_step
from plantune.graph.types import TensorType
from plantune.kernels.family import Candidate
from plantune.measure.worker.client import Worker
from plantune.base.canonical import Attrs
builder = GraphBuilder()
graph = builder.build(builder.emit("relu", builder.input("x", TensorType((4, 4)))))
with Worker(threads=1) as worker:
    print(worker.pid, flush=True)
    if sys.argv[1] == "idle":
        sys.stdin.read()
    step = make_step(graph, ["relu"])
    worker.check_and_time(step, Candidate("faulty", Attrs(fault=sys.argv[1])), "cpu")
"""


@pytest.mark.parametrize("state", ["idle", "endless_with_lock"])
@pytest.mark.usefixtures("fresh_processes")
def test_a_worker_dies_with_its_parent(state, eventually, is_gone):
    """Kill -9 of the parent while its worker waits, or while a kernel keeps it busy."""
    command = [sys.executable, "-W", "ignore", "-c", PARENT, state]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env={**os.environ, **FAMILIES}, stdin=pipe, stdout=pipe, text=True
    ) as parent:
        pid = int(parent.stdout.readline())
        time.sleep(0 if state == "idle" else 1)
        assert not is_gone(pid)
        parent.kill()
        eventually(lambda: is_gone(pid), "it outlives its parent")


@pytest.mark.usefixtures("fresh_processes")  # a copy may be there at once
def test_one_that_is_not_needed_at_once_starts_when_asked_and_outlives_the_thread_that_did(relu):
    with Worker(threads=1, limits=LIMITS, environment=FAMILIES, at_once=False) as worker:
        assert worker.pid is None
        with pytest.raises(OutOfTime):
            worker.start(cut_at=time.monotonic())
        starter = threading.Thread(target=worker.start)
        starter.start()
        starter.join()
        pid = worker.pid
        time.sleep(0.2)
        assert is_good(worker.check_and_time(relu, faulty("none"), "cpu", EFFORT))
        assert worker.pid == pid


def test_threads_take_turns(ask):
    outcomes: list[Outcome] = []
    threads = [threading.Thread(target=lambda: outcomes.append(ask("none"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(map(is_good, outcomes)) == [True] * 3


def test_the_wall_clock_may_jump(ask, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert is_good(ask("none"))


def test_a_program_that_takes_too_long_is_raised(relu, monkeypatch):
    """There is no outcome for several plans at once."""
    graph = Graph(relu.inputs, (), (), relu.nodes, ("relu",))

    def too_late(channel, deadline):
        raise TimeoutError

    with Worker(threads=1, limits=Limits(run_s=-1.0)) as worker:
        monkeypatch.setattr(Channel, "receive", too_late)  # a quick answer is taken at any time
        with pytest.raises(MeasureTimeout, match=r"start took over -1 s; the worker was killed"):
            worker.time_programs(graph, [], EFFORT)
        assert worker.pid is None


def test_a_worker_that_somebody_stopped_is_told_from_a_slow_one(relu, is_gone):
    graph = Graph(relu.inputs, (), (), relu.nodes, ("relu",))
    with Worker(threads=1, limits=Limits(run_s=0.2)) as worker:
        stopped = worker.pid
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(WorkerDied, match="was stopped by somebody during start"):
            worker.time_programs(graph, [], EFFORT)
        assert is_gone(stopped)


def test_a_candidate_whose_worker_was_killed_from_elsewhere_is_tried_once_more(worker, relu):
    killed = []

    def kill(stage, times):
        if stage == "check" and len(killed) < times:
            killed.append(worker.pid)
            os.kill(worker.pid, signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "on_stage", lambda stage: kill(stage, 1))
        assert is_good(worker.check_and_time(relu, FRAMEWORK, "cpu", EFFORT))
        patch.setattr(worker, "on_stage", lambda stage: kill(stage, 3))
        outcome = worker.check_and_time(relu, FRAMEWORK, "cpu", EFFORT)
    assert isinstance(outcome, Rejected)
    assert "SIGKILL" in outcome.reason
    assert len(set(killed)) == 3


def test_closing_ends_what_another_thread_asks(relu):
    """A search that is interrupted does not wait for what its GPUs measure."""
    said = queue.SimpleQueue()
    worker = Worker(threads=1, limits=LIMITS, environment=FAMILIES)
    worker.start()
    worker.on_stage = said.put

    def ask():
        try:
            said.put(worker.check_and_time(relu, faulty("endless_with_lock"), "cpu", EFFORT))
        except WorkerDied as error:
            said.put(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    while said.get(timeout=60) != "check":
        pass
    worker.close()
    thread.join(60)
    assert not thread.is_alive()
    assert worker.pid is None


@pytest.mark.parametrize("precisions", [("ieee", "tf32", "ieee"), ("tf32", "ieee", "tf32")])
def test_it_computes_float32_as_this_process_is_set(
    worker: Worker, relu: Step, precisions: tuple[str, ...]
) -> None:
    """Else a search would time torch's kernels of one setting for calls under another."""
    with planned_for(precisions):
        outcome = worker.check_and_time(relu, faulty("settings"), "cpu", EFFORT)
    assert isinstance(outcome, Rejected)
    assert " ".join(precisions) in outcome.reason
