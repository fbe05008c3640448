"""Plans that may be the fastest run again: luck chose among many of few rounds."""

from __future__ import annotations

import pytest

from plantune.base.outcome import Rejected
from plantune.measure.timing import Timing
from plantune.search.contenders.comparison import close, of_makes, whole
from plantune.search.contenders.ranking import _close_again
from plantune.search.contenders.timing import makes_that_fit
from plantune.search.policy import MAKES

from .runs import FakeWorker, run_of


class Drawing(FakeWorker):
    """In the first race of all plans luck decides; further makes, each with these times, tell."""

    def __init__(self, *more):
        super().__init__()
        self.more = more

    def time_programs(self, graph, plans, effort, seed=0):
        self.asked.append(list(plans))
        self.efforts.append(effort)
        return list(self.more) * (len(plans) // len(self.more))


LUCKY, UNLUCKY, SLOW = (Timing((us,) * 5) for us in (99.0, 104.0, 112.0))


class TestPlansThatAreClose:
    def test_they_run_again_without_the_others(self):
        worker = Drawing(Timing((106.0,) * 9), Timing((100.0,) * 9))
        found = _close_again(run_of(worker), ["a", "b", "c"], [SLOW, LUCKY, UNLUCKY])
        assert worker.asked == [["b", "c"] * MAKES["cpu"]]
        assert [timing.samples for timing in found] == [5, 5 + 27, 5 + 27]
        assert fastest_of(found) == 2

    @pytest.mark.parametrize(("arch", "known_to"), [("cpu", 0.02), ("sm90", 0.005)])
    def test_what_slow_phases_made_noisy_is_not_repeated(self, arch, known_to):
        """The first ten rounds of all plans would have taken all the time of these."""
        worker = Drawing(Timing((104.0,) * 9), Timing((100.0,) * 9))
        _close_again(run_of(worker, arch), ["b", "c"], [LUCKY, UNLUCKY])
        (effort,) = worker.efforts
        assert (effort.retries, effort.relative, effort.tolerance) == (0, True, known_to)

    def test_the_machine_may_have_another_speed_by_then(self):
        worker = Drawing(Timing((212.0,) * 9), Timing((200.0,) * 9))
        found = _close_again(run_of(worker), ["a", "b", "c"], [SLOW, LUCKY, UNLUCKY])
        assert fastest_of(found) == 2
        assert found[0].median_us == pytest.approx(112 * 2, rel=0.1)

    def test_a_make_for_which_the_time_was_up_says_nothing(self):
        late = Rejected("timeout", "no time")
        makes = [[LUCKY, UNLUCKY], [UNLUCKY, LUCKY], [SLOW, late]]
        assert [timing.samples for timing in of_makes(whole(makes))] == [10, 10]
        assert of_makes(whole(makes[2:])) == [SLOW, late]

    def test_makes_that_were_timed_count_as_much_as_the_first(self):
        late, again = Rejected("timeout", "no time"), Timing((100.0,) * 9)
        worker = Drawing(again, again, late, late, late, late)
        found = _close_again(run_of(worker), ["a", "b", "c"], [SLOW, LUCKY, UNLUCKY])
        assert [timing.samples for timing in found] == [5, 5 + 9, 5 + 9]

    @pytest.mark.parametrize(
        ("kind", "call_ms", "seconds", "makes"),
        [("cpu", 4, 3.0, 3), ("cpu", 120, 3.0, 2), ("cpu", 900, 3.0, 1), ("cuda", 1, 9.0, 1)],
    )
    def test_slow_ones_are_made_less_often(self, kind, call_ms, seconds, makes):
        assert makes_that_fit(kind, 1e3 * call_ms, seconds) == makes

    def test_no_more_than_four_share_the_time(self):
        timings = [Timing((us,) * 5) for us in (104.0, 100.0, 105.0, 103.0, 101.0, 102.0)]
        assert close(timings, "cpu") == [1, 3, 4, 5]

    def test_one_alone_has_won(self):
        worker = Drawing()
        assert _close_again(run_of(worker), ["a", "b"], [SLOW, LUCKY]) == [SLOW, LUCKY]
        assert worker.asked == []

    def test_without_time_they_stay_as_they_are(self):
        worker = Drawing(Rejected("timeout", "no time"), Rejected("timeout", "no time"))
        found = [LUCKY, UNLUCKY]
        assert _close_again(run_of(worker), ["a", "b"], found) == found
        assert _close_again(run_of(worker, seconds=0.0), ["a", "b"], found) == found
        assert len(worker.asked) == 1

    def test_what_crashes_the_second_time_is_out(self):
        worker = Drawing(LUCKY, Rejected("crash", "an illegal memory access"))
        found = _close_again(run_of(worker), ["a", "b"], [LUCKY, UNLUCKY])
        assert [isinstance(each, Rejected) for each in found] == [False, True]


def fastest_of(timings):
    return min(close(timings, "cpu"), key=lambda i: timings[i].median_us)
