"""Several workers measure beside each other: all are busy, and nothing is measured twice."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from plantune.base.canonical import Attrs
from plantune.base.outcome import Measured
from plantune.devices.cuda.flags import float32_precisions, planned_for
from plantune.devices.gpus import LocalGpu, Slot, slots_of
from plantune.devices.machine import cpu_environment
from plantune.errors import OutOfTime, UnlikeGpus, UnsupportedDevice, WorkerDied, WorkerFailed
from plantune.report.progress import progress_text
from plantune.search.budget import Budget
from plantune.search.results import Patience, silent
from plantune.search.shared import slots as slots_module
from plantune.search.shared.board import Board
from plantune.search.shared.board_rows import SharedSearch
from plantune.search.shared.rdb import Persistent, close_shared, opened_shared
from plantune.search.shared.slots import environment_on
from plantune.search.step_search import StepSearch
from plantune.search.worker_pool import WorkerPool
from plantune.space.arch import load_arch

pytestmark = pytest.mark.usefixtures("as_with_a_compiler")
PLENTY = 600.0
NEVER_S = 20.0


@dataclass
class Meeting:
    """Lets nobody go on before so many are there, once."""

    barrier: threading.Barrier
    met: bool = False

    def wait(self) -> None:
        if not self.met:
            self.barrier.wait(NEVER_S)
            self.met = True


@dataclass
class InSlot:
    """A measurer of a pool, whose times are the same on each slot."""

    times: object
    meeting: Meeting | None = None
    errors: list[BaseException] = field(default_factory=list)
    asked: list[object] = field(default_factory=list)

    def measure(self, step, candidate, limit_us):
        self.asked.append((step.signature, candidate))
        if self.meeting is not None:
            self.meeting.wait()
        if self.errors:
            raise self.errors.pop(0)
        us = self.times.time_us(step, candidate)
        return Measured(us, us, us, 9, 1e-7, 1e-6, True)


def of_pool(graph, space, store, measurers):
    return StepSearch(graph, space, WorkerPool(measurers, ["GPU 0", "GPU 1"]), store)


def test_all_slots_measure_at_once_and_nothing_twice(graph, space, store, measurer):
    meeting = Meeting(threading.Barrier(3))
    measurers = [InSlot(measurer, meeting) for _ in range(3)]
    search = of_pool(graph, space, store, measurers)
    search.run(Budget(PLENTY), silent)
    asked = [key for each in measurers for key in each.asked]
    assert len(asked) == len(set(asked)) == sum(map(len, store.rows.values()))
    assert all(each.asked for each in measurers)
    assert search.complete
    assert all(map(search.costs.knows, search.covers(1)[0][1]))


def test_the_plan_is_as_good_as_that_of_one_slot(graph, space, store, measurer):
    alone = StepSearch(graph, space, measurer, type(store)())
    alone.run(Budget(PLENTY), silent)
    search = of_pool(graph, space, store, [InSlot(measurer) for _ in range(4)])
    search.run(Budget(PLENTY), silent)
    assert search.covers(1)[0][0] <= 1.1 * alone.covers(1)[0][0]


def test_a_given_set_is_measured_whole(graph, space, store, measurer):
    measurers = [InSlot(measurer), InSlot(measurer)]
    search = of_pool(graph, space, store, measurers)
    wanted = list({candidate.key: candidate for candidate in search.candidates}.values())[:40]
    search.measure_all(wanted, Budget(PLENTY), silent)
    assert {key for each in measurers for key in each.asked} == {c.key for c in wanted}
    assert all(map(search.costs.knows, wanted))


def test_slots_of_searches_that_share_measure_each_candidate_once(
    graph, space, store, measurer, tmp_path
):
    """`--gpus` beside `--storage`: all four slots are busy at once."""
    url, meeting = f"sqlite:///{tmp_path}/shared.db", Meeting(threading.Barrier(4))
    slots = [InSlot(measurer, meeting) for _ in range(4)]
    close_shared(opened_shared(url, Patience(30)))  # made the tables

    def searched(own):
        storage = opened_shared(url, Patience(30))
        does = Persistent(url, NEVER_S, print)
        board = Board(SharedSearch(storage, "net"), cpu_environment(), does, print)
        board.join()
        pool = WorkerPool(own, shared=board)
        steps = StepSearch(graph, space, pool, type(store)())
        wanted = list({c.key: c for c in steps.candidates}.values())[:16]
        while missing := [c for c in wanted if not steps.costs.knows(c)]:
            free = board.spread([c for c in missing if not board.has(c)])
            steps.measure_all(free[:4], Budget(PLENTY), silent)
            steps.observe_others()
        board.leave()
        close_shared(storage)
        return {candidate.key for candidate in wanted}

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(searched, (slots[:2], slots[2:]))
    asked = [key for each in slots for key in each.asked]
    assert len(asked) == len(set(asked))
    assert set(asked) == one == other


def test_seldom_do_two_slots_make_the_references_of_one_step():
    """The slots measure in step, and candidates come as a search has them: the first of each step,
    then the second ones.
    """
    together, asked = threading.Barrier(2), ([], [])

    def slot(own):
        def measure(step, candidate, limit_us):
            own.append((step.signature, candidate))
            together.wait(NEVER_S)
            return Measured(1.0, 1.0, 1.0, 9, 0.0, 1.0, True)

        return SimpleNamespace(measure=measure)

    pool = WorkerPool([slot(own) for own in asked])
    steps = [SimpleNamespace(signature=f"step {number}") for number in range(21)]
    for candidate in range(4):
        for step in steps:
            while pool.is_full:
                pool.finished()
            key = (step.signature, candidate)
            pool.start(SimpleNamespace(key=key, step=step, candidate=candidate), 1.0)
    while not pool.is_idle:
        pool.finished()
    assert sum(map(len, asked)) == 84
    made = [{step for step, _ in own} for own in asked]
    # Of 42. Which slot is free first is the threads' luck, so some are made twice.
    assert sum(map(len, made)) < 1.5 * len(steps)


@pytest.mark.parametrize("error", [WorkerDied("it does not start"), UnsupportedDevice("lost")])
def test_the_others_measure_what_a_lost_slot_was_given(graph, space, store, measurer, error):
    meeting = Meeting(threading.Barrier(2))
    lost, other = InSlot(measurer, meeting, [error]), InSlot(measurer, meeting)
    search = of_pool(graph, space, store, [lost, other])
    with pytest.warns(UserWarning, match="GPU 0 was lost, the others go on"):
        search.run(Budget(PLENTY), silent)
    assert len(lost.asked) == 1
    assert lost.asked[0] in other.asked
    assert search.complete


def test_the_last_lost_slot_ends_the_search(graph, space, store, measurer):
    measurers = [InSlot(measurer, errors=[UnsupportedDevice(str(slot))]) for slot in range(2)]
    search = of_pool(graph, space, store, measurers)
    with pytest.warns(UserWarning, match="was lost"), pytest.raises(UnsupportedDevice):
        search.run(Budget(PLENTY), silent)


def test_a_fault_of_plantune_ends_the_search(graph, space, store, measurer):
    meeting = Meeting(threading.Barrier(2))
    measurers = [InSlot(measurer, meeting, [WorkerFailed("a bug")]), InSlot(measurer, meeting)]
    with pytest.raises(WorkerFailed, match="a bug"):
        of_pool(graph, space, store, measurers).run(Budget(PLENTY), silent)


def test_what_is_measured_when_the_time_is_over_still_counts(graph, space, store, measurer):
    meeting = Meeting(threading.Barrier(2))
    measurers = [InSlot(measurer, meeting, [OutOfTime("over")]), InSlot(measurer, meeting)]
    search = of_pool(graph, space, store, measurers)
    search.run(Budget(PLENTY), silent)
    assert measurers[1].asked[0] in {(s, c) for s, row in store.rows.items() for c in row}
    assert not search.complete


def test_progress_says_what_each_worker_does(graph, space, store, measurer, eventually):
    go = threading.Event()
    waiting = SimpleNamespace(measure=lambda *asked: go.wait(NEVER_S) and measurer.measure(*asked))
    pool = WorkerPool([waiting, waiting], ["GPU 0", "GPU 1"])
    search = StepSearch(graph, space, pool, store)
    first, second = search.candidates[:1] + search.candidates[-1:]
    pool.start(first, 1.0)
    pool.start(second, 1.0)
    doing = eventually(lambda: len(pool.doing()) == 2 and pool.doing(), "both are busy")
    assert {text.partition(" ")[0] for text in doing} == {"GPU"}
    found = search.progress(Budget(PLENTY), first)
    for candidate in (first, second):
        assert f"{candidate.step.name}: {candidate.candidate.family}" in progress_text(found)
    go.set()
    assert pool.finished(NEVER_S) is not None
    assert pool.finished(NEVER_S) is not None
    assert pool.is_idle


class TestSeats:
    @pytest.fixture
    def here(self, monkeypatch):
        def put(*capabilities):
            found = [LocalGpu(i, f"GPU {c}", c, 1 << 30) for i, c in enumerate(capabilities)]
            monkeypatch.setattr("plantune.devices.gpus.gpus_here", lambda: tuple(found))

        return put

    def test_all_are_those_of_the_arch(self, here):
        here((9, 0), (8, 0), (9, 0))
        assert [slot.gpu for slot in slots_of(load_arch("sm90"), None)] == [0, 2]

    def test_one_of_another_arch_or_none_is_refused(self, here):
        here((9, 0), (8, 0))
        with pytest.raises(UnlikeGpus, match=r"GPU 1 is a .*sm80.* for sm90"):
            slots_of(load_arch("sm90"), (0, 1))
        with pytest.raises(UnsupportedDevice, match="GPU 7 is not here"):
            slots_of(load_arch("sm90"), (7,))

    def test_a_worker_sees_its_gpu_alone(self, monkeypatch):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        assert Slot("b", 1).environment == {"CUDA_VISIBLE_DEVICES": "1"}
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-8a")
        assert Slot("b", 1).environment == {"CUDA_VISIBLE_DEVICES": "GPU-8a"}

    def test_gpus_of_two_kinds_are_refused_with_both_named(self, monkeypatch):
        first = cpu_environment()
        fields = {**vars(first), "gpu": Attrs(sm_count=132)}
        found = [type(first)(**fields), type(first)(**{**fields, "gpu": Attrs(sm_count=114)})]
        monkeypatch.setattr(slots_module, "environment_of", lambda place: found[place.index])
        slots = (Slot("GPU 0", 0), Slot("GPU 1", 1))
        with pytest.raises(UnlikeGpus, match=r"GPU 0 .* and GPU 1 .* sm_count is 132 and 114"):
            environment_on(slots, "sm90")
        found[1] = found[0]
        assert environment_on(slots, "sm90") == found[0]


def test_the_building_process_stands_still_while_any_worker_times():
    from plantune.search.builds import Times

    found = []
    times = Times(found.append)
    first, second = times.of(SimpleNamespace()), times.of(SimpleNamespace())
    for stage in (first, "time"), (second, "time"), (first, "idle"), (second, "idle"):
        stage[0](stage[1])
    assert found == [True, True, True, False]


@pytest.mark.parametrize("slots", [1, 2])
def test_each_slot_measures_for_the_settings_of_the_search(graph, space, store, measurer, slots):
    """Whatever another thread sets meanwhile."""

    class Asked(InSlot):
        def measure(self, step, candidate, limit_us):
            seen.add(float32_precisions())
            return super().measure(step, candidate, limit_us)

    seen: set[tuple[str, ...]] = set()
    measurers = [Asked(measurer) for _ in range(slots)]
    with planned_for(("tf32", "tf32", "ieee")):
        of_pool(graph, space, store, measurers).run(Budget(PLENTY), silent)
    assert seen == {("tf32", "tf32", "ieee")}
