"""Ranks learn from the store what the others do, and end where they would wait in vain."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from plantune import TrainStep
from plantune.errors import RanksDiffer
from plantune.training import groups
from plantune.training import ranks as ranks_module
from plantune.training import watch as watch_module
from plantune.training.ranks import Ranks
from plantune.training.replays import MOST_TRIES, Replays
from plantune.training.watch import Watch

CPU = torch.device("cpu")


@pytest.fixture
def pair(monkeypatch):
    """Two ranks in one process."""
    store = dist.HashStore()
    monkeypatch.setattr(ranks_module, "new_store", lambda group: store)

    def rank(number):
        return Ranks(SimpleNamespace(rank=lambda: number, size=lambda: 2), 5.0)

    return rank(0), rank(1)


def both(*calls):
    """What each call gives or raises, in threads beside each other."""

    def run(call):
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return [*pool.map(run, calls)]


def test_the_next_group_reads_nothing_of_the_last_one(monkeypatch):
    """Torchrun's store outlives both, and all their steps say the same."""
    kept = dist.HashStore()
    monkeypatch.setattr(groups, "_get_process_group_store", lambda group: kept)
    for _ in range(2):
        ranks = [
            Ranks(SimpleNamespace(rank=lambda number=number: number, size=lambda: 2), 5.0)
            for number in (0, 1)
        ]
        assert ranks[0].left(1) is None
        assert both(*(partial(rank.all_say, "here") for rank in ranks)) == [True, True]
        for rank in ranks:
            rank.leave("closed its training step", 0)
        assert ranks[0].left(1) == (0, "closed its training step")


class TestMeeting:
    def test_each_hears_what_all_say(self, pair):
        one, other = pair
        assert both(lambda: one.gather("a"), lambda: other.gather("b")) == [["a", "b"], ["a", "b"]]
        assert both(lambda: one.all_say("c"), lambda: other.all_say("c")) == [True, True]

    def test_who_is_past_does_not_come(self, pair):
        one, other = pair
        for rank in pair:
            rank.begin()
        one.past()
        one.report()
        assert other.gather("here") == [None, "here"]

    def test_one_that_left_is_not_waited_for(self, pair):
        one, other = pair
        other.begin()
        one.leave("raised ValueError: no", 0)
        with pytest.raises(RanksDiffer, match="rank 0 raised ValueError: no"):
            other.gather("here")
        with pytest.raises(RanksDiffer, match="no longer takes part"):
            one.begin()

    def test_waiting_has_an_end(self, pair):
        one, other = pair
        one.report()
        other.deadline_s = 0.02
        with pytest.raises(RanksDiffer, match=r"rank 0 was alive \d s ago, in its call 0"):
            other.gather("here")

    def test_a_rank_that_is_closed_lets_go_of_its_group(self, pair, monkeypatch):
        """Else the store would be served on, with all that was said in it."""

        class Group:
            rank, size = staticmethod(lambda: 0), staticmethod(lambda: 1)

        group = Group()
        held = weakref.ref(group)
        rank = Ranks(group, 5.0)
        rank.leave("closed its training step", 0)
        rank.forget()
        del group
        assert held() is None
        with pytest.raises(RuntimeError, match="it closed its training step"):
            rank.report()
        with pytest.raises(RanksDiffer, match="no longer takes part"):
            rank.begin()

    def test_an_error_on_one_is_one_on_all(self, pair):
        def broken():
            raise ValueError("no")

        one, other = pair
        mine, theirs = both(
            lambda: one.together("the choice", broken), lambda: other.together("the choice", int)
        )
        assert (type(mine), type(theirs)) == (ValueError, RanksDiffer)
        assert str(theirs) == "the choice failed on rank 0: ValueError: no"

    def test_the_first_difference_is_named(self, pair):
        one, other = pair
        found = both(
            lambda: one.must_agree("steps", ["a=1", "b=2"]),
            lambda: other.must_agree("steps", ["a=1", "b=3"]),
        )
        assert {str(error) for error in found} == {"steps differ: rank 0 has b=2, rank 1 has b=3"}


class TestWatch:
    @pytest.fixture
    def done(self, monkeypatch):
        """What is done at the end, in order."""
        found = []
        monkeypatch.setattr(watch_module.os, "_exit", lambda code: found.append(f"exit {code}"))
        monkeypatch.setattr(watch_module, "_exit_later", lambda: None)
        monkeypatch.setattr(watch_module, "HEARD_S", 0.0)
        monkeypatch.setattr(watch_module, "TICK_S", 1000.0)
        monkeypatch.setattr(watch_module.atexit, "register", lambda *call: None)
        return found

    @pytest.fixture
    def owner(self, done):
        class Owner:
            def drop(self):
                done.append("drop")

        return Owner()

    @pytest.fixture
    def watch(self, pair, owner):
        made = Watch(pair[0], CPU, owner.drop)
        yield made
        made.stop()

    def test_a_step_that_waits_for_who_has_left_ends_the_process(self, pair, watch, done, capsys):
        one, other = pair
        other.leave("raised ValueError: no luck in its call 1", 0)
        with watch.step():
            watch.look()
            assert done == []  # it does not wait for others yet
            one.past()
            watch.look()
        assert done == ["exit 1"]
        assert capsys.readouterr().err == (
            "plantune: rank 0 ends: call 1 of its training step cannot end: "
            "rank 1 raised ValueError: no luck in its call 1\n"
        )
        assert other.left(0)[0] == 0

    def test_it_ends_though_nobody_reads_why(self, pair, watch, done, monkeypatch):
        """Such as where what gathered the ranks' lines is gone; its thread died of it."""

        def broken(text):
            raise BrokenPipeError

        monkeypatch.setattr(watch_module.sys, "stderr", SimpleNamespace(write=broken))
        pair[1].leave("ended", 0)
        with watch.step():
            pair[0].past()
            watch.look()
        assert done == ["exit 1"]

    def test_one_that_took_part_in_that_step_may_leave(self, pair, watch, done):
        pair[1].leave("ended", 1)
        with watch.step():
            pair[0].past()
            watch.look()
        assert done == []

    def test_each_step_has_a_deadline(self, pair, watch, done, capsys):
        pair[0].deadline_s = 0.0
        with watch.step():
            pair[0].past()
            watch.look()
            assert done == []
            watch.look()
        assert done == ["exit 1"]
        assert "nothing was heard of rank 1" in capsys.readouterr().err

    def test_steps_that_end_are_no_waiting(self, pair, watch, done):
        pair[0].deadline_s = 0.0
        for _ in range(3):
            with watch.step():
                pair[0].past()
                watch.look()
        assert done == []

    def test_the_gpu_s_own_steps_are_waited_for_until_it_is_lost(self, pair, watch, done):
        states = iter([False, False, True, False])

        def query():
            return next(states)

        pair[0].deadline_s = 1000.0
        watch._latest = (1, SimpleNamespace(query=query))
        assert [watch._waiting() for _ in range(3)] == [1, 1, None]
        watch._latest = (2, SimpleNamespace(query=query))
        assert watch._waiting() == 2

        def lost():
            raise RuntimeError("CUDA error: unspecified launch failure")

        watch._sample = (2, SimpleNamespace(query=lost))
        assert watch._waiting() is None
        assert watch._stop.is_set()
        assert done == []

    def test_each_step_on_a_gpu_ends_with_an_event_unless_it_is_captured(
        self, pair, watch, monkeypatch
    ):
        recorded, captures = [], [False, True, False]
        event = SimpleNamespace(record=recorded.append, query=lambda: False)
        monkeypatch.setattr(torch.cuda, "Event", lambda: event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures.pop(0))
        watch._device = torch.device("cuda", 0)
        for _ in range(3):
            with watch.step():
                pass
        assert recorded == ["stream", "stream"]
        assert watch._waiting() == 3

    def test_a_store_that_is_gone_ends_a_step_sooner(self, pair, watch, done, monkeypatch, capsys):
        def gone(*_):
            raise RuntimeError("connection reset")

        monkeypatch.setattr(watch_module, "WITHOUT_STORE_S", 0.0)
        pair[0]._connection = None, SimpleNamespace(set=gone, get=gone, check=gone)
        with watch.step():
            pair[0].past()
            watch.look()
            watch.look()
        assert done[-1] == "exit 1"
        assert "the store of the process group is gone" in capsys.readouterr().err

    def test_at_the_end_it_watches_until_graphs_are_gone(self, pair, done, capsys):
        """One may wait in a collective for a rank that is gone."""

        class Owner:
            def drop(self):
                pair[1].leave("ended by a signal", 0)
                watch.look()
                done.append("drop")

        owner = Owner()
        watch = Watch(pair[0], CPU, owner.drop)
        pair[0].begin()
        watch._latest = (1, SimpleNamespace(query=lambda: False))
        watch.leave()
        assert done == ["exit 1", "drop"]
        assert "rank 1 ended by a signal" in capsys.readouterr().err
        assert watch._stop.is_set()

    def test_an_error_in_a_step_is_told(self, pair, watch):
        with pytest.raises(ValueError, match="no"), watch.step():
            raise ValueError("no")
        assert pair[1].left(0) == (0, "raised ValueError: no in its call 1")

    def test_its_thread_gives_signs_of_life_until_it_is_gone(
        self, pair, owner, monkeypatch, eventually
    ):
        monkeypatch.setattr(watch_module, "TICK_S", 0.001)
        one, other = pair
        made = Watch(one, CPU, owner.drop)
        one.begin()
        eventually(lambda: "in its call 1" in other.heard_of(0), "no sign of life")
        count = threading.active_count()
        del made
        eventually(lambda: threading.active_count() < count, "the thread goes on")


class TestCaptures:
    @pytest.fixture
    def step(self, model, twin, captures, monkeypatch):
        """Makes a training step whose graphs are captured with another rank."""
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

        def make(ranks):
            own = twin(model)
            made = TrainStep(own, cross_entropy, torch.optim.SGD(own.parameters(), 0.1))
            run = Replays(made._run, CPU, ranks)

            def call(x, y):
                ranks.begin()
                value = run(((x,), (y,)))
                ranks.past()
                ranks.report()
                return value

            return run, call

        return make

    def captured(self, run):
        return [kind.captured is not None for kind in run._kinds.values()]

    def test_all_capture_in_the_same_call(self, pair, step, batches):
        made = [step(rank) for rank in pair]
        for batch in batches[:3]:
            both(*(partial(call, *batch) for _, call in made))
        assert [self.captured(run) for run, _ in made] == [[True], [True]]

    def test_none_keeps_a_graph_if_one_fails(self, pair, step, batches, captures, monkeypatch):
        (run, call), (other, its) = (step(rank) for rank in pair)
        monkeypatch.setattr(other, "_capture", lambda kind, given: None)
        for batch in batches[:4]:
            both(partial(call, *batch), partial(its, *batch))
        assert self.captured(run) == self.captured(other) == [False]
        assert [made.is_gone for made in captures.made] == [True]

    def test_one_whose_calls_are_of_other_kinds_captures_nothing(self, pair, step, batches):
        (run, call), (other, its) = (step(rank) for rank in pair)
        for number, (x, y) in enumerate(batches[: MOST_TRIES + 3]):
            size = 8 - number
            both(partial(call, x, y), partial(its, x[:size], y[:size]))
        assert self.captured(run) == [False]
        assert not any(self.captured(other))
