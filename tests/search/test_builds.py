"""Building ahead: in which order, what fails, and what a search makes of it."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from plantune.base.outcome import Rejected
from plantune.errors import BuildError, WorkerDied
from plantune.search import builds as builds_module
from plantune.search.budget import Budget
from plantune.search.builds import Builds, builds_for
from plantune.search.results import silent
from plantune.search.step_search import StepSearch
from plantune.space.arch import load_arch

pytestmark = pytest.mark.usefixtures("as_with_a_compiler")


class Compiler:
    """Builds one thing at a time, when it is let."""

    def __init__(self, fails=()):
        self.order = []
        self.fails = fails
        self.free = threading.Event()
        self.free.set()

    def __call__(self, candidate):
        assert self.free.wait(10)
        self.order.append(candidate)
        if candidate.candidate.family in self.fails:
            raise BuildError("error: expected ';'")


@pytest.fixture
def search(graph, space, measurer, store):
    return StepSearch(graph, space, measurer, store)


def built(search):
    """Candidates of families that build something."""
    return [t for t in search.candidates if t.candidate.family in ("winograd", "inductor")]


def source(candidate):
    return candidate.key if candidate.candidate.family in ("winograd", "inductor") else None


@pytest.fixture
def start():
    started = []

    def make(compiler, threads=1):
        started.append(Builds(compiler, source, threads))
        return started[-1]

    yield make
    for builds in started:
        builds.close()


def test_what_is_wanted_first_is_built_first(search, start):
    compiler = Compiler()
    builds = start(compiler)
    wanted = built(search)[:4]
    compiler.free.clear()
    builds.want(wanted)
    while not builds._state:
        pass
    builds.want([wanted[3], wanted[1], wanted[2]])
    assert not any(map(builds.is_ready, wanted))
    compiler.free.set()
    for candidate in (wanted[0], wanted[3], wanted[1], wanted[2]):
        assert builds.wait([candidate], 5)
    assert compiler.order == [wanted[0], wanted[3], wanted[1], wanted[2]]


def test_equal_sources_are_built_once(search):
    compiler = Compiler()
    builds = Builds(compiler, lambda candidate: "the same", 2)
    wanted = built(search)[:3]
    builds.want(wanted)
    assert builds.wait(wanted[2:], 5)
    builds.close()
    assert len(compiler.order) == 1


def test_what_builds_nothing_is_ready(search, start):
    builds = start(Compiler())
    plain = next(t for t in search.candidates if t.candidate.family == "framework")
    assert builds.is_ready(plain)
    assert builds.failure(plain) is None


def test_waiting_ends(search, start):
    builds = start(Compiler())
    assert not builds.wait(built(search)[:1], 0.01)


def test_a_failure_is_known_without_measuring(graph, space, measurer, store, start):
    """The worker never sees what does not compile."""
    builds = start(Compiler(fails=("winograd",)), threads=2)
    search = StepSearch(graph, space, measurer, store, builds=builds)
    search.run(Budget(20.0), silent)
    assert not any(candidate.family == "winograd" for _, candidate in measurer.asked)
    rows = [outcome for known in store.rows.values() for outcome in known.items()]
    found = {o for candidate, o in rows if candidate.family == "winograd"}
    assert found == {Rejected("build", "error: expected ';'")}


def test_the_result_does_not_depend_on_building_ahead(graph, space, measurer, store, broken, start):
    search = StepSearch(graph, space, measurer, store, builds=start(Compiler(), threads=2))
    search.run(Budget(20.0), silent)
    plain = StepSearch(graph, space, broken(), type(store)())
    plain.run(Budget(20.0), silent)
    assert search.covers(1)[0][0] <= 1.001 * plain.covers(1)[0][0]


def test_an_unexpected_fault_is_left_to_the_worker(search, start):
    def broken_compiler(candidate):
        raise KeyError("a mistake of whoever wrote this family")

    builds = start(broken_compiler)
    candidate = built(search)[0]
    builds.want([candidate])
    assert builds.wait([candidate], 5)
    assert builds.failure(candidate) is None
    assert not builds.built


def test_only_what_was_built_to_the_end_counts_as_built(search, start):
    """A builder that is killed amid a kernel leaves it to the worker, for which there may be no
    time.
    """

    def killed(candidate):
        if candidate is dying:
            raise WorkerDied("signal 9")

    builds = start(killed)
    done, dying = built(search)[:2]
    builds.want([done, dying])
    assert builds.wait([dying], 5)
    assert builds.built == {source(done)}


class StandIn:
    """Builds in no time, and remembers what was asked of it."""

    def __init__(self, worker):
        self.asked = []

    def start(self):
        self.started = True

    def build(self, step, candidate, arch):
        self.asked.append(candidate.family)

    def pause(self, paused):
        self.asked.append(paused)

    def close(self):
        self.asked.append("closed")


def test_for_a_cpu_another_process_builds_and_stands_still_while_times_are_taken(
    search, monkeypatch
):
    made = []
    monkeypatch.setattr(builds_module, "Builder", lambda *a: made.append(StandIn(*a)) or made[0])
    worker = SimpleNamespace(on_stage=None)
    slow = next(t for t in search.candidates if t.candidate.family == "inductor")
    with builds_for(load_arch("cpu"), worker) as builds:
        assert not builds.is_ready(slow)
        assert all(builds.is_ready(t) for t in search.candidates if t.candidate.family == "view")
        builds.want([slow])
        assert builds.wait([slow], 10)
        for stage in ("build", "check", "time", "idle"):
            worker.on_stage(stage)
    assert made[0].asked == ["inductor", False, False, True, False, "closed"]


def test_the_framework_is_timed_while_the_first_kernels_are_built(
    graph, space, measurer, store, start
):
    """Once each op, at its largest: from then on guesses for the framework mean something."""
    builds = start(Compiler(), threads=2)
    StepSearch(graph, space, measurer, store, builds=builds).run(Budget(20.0), silent)
    ops = len({node.op for node in graph.nodes})
    first = [candidate for _, candidate in measurer.asked[:ops]]
    assert {(c.family, c.config["layout"]) for c in first} == {("framework", "nchw")}
    assert len(set(measurer.asked)) == len(measurer.asked)


@pytest.mark.parametrize("compiler", [None, "/bin/g++"])
def test_the_building_process_starts_at_once_if_anything_can_be_built(monkeypatch, compiler):
    """Later its start would disturb what is timed."""
    started = threading.Event()

    class Starting(StandIn):
        def start(self):
            started.set()

    monkeypatch.setattr(builds_module, "Builder", Starting)
    monkeypatch.setattr(builds_module, "cxx_compiler", lambda: compiler)
    with builds_for(load_arch("cpu"), SimpleNamespace(on_stage=None)) as builds:
        assert started.wait(10 if compiler else 0.2) == (compiler is not None)
        builds.want([])
