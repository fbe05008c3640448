"""Which config comes next, and when to stop."""

from __future__ import annotations

import itertools
import random

import pytest

from plantune.base.canonical import Attrs
from plantune.kernels.family import Candidate
from plantune.search.policy import MOST_IN_ORDER, PATIENCE, SERIOUS, TRIED_IN_ORDER
from plantune.search.queue import Queue
from plantune.search.studies import Studies


def candidate(number):
    return Candidate("conv", Attrs(tile=number))


def test_candidates_come_in_order():
    candidates = [candidate(n) for n in range(5)]
    queue = Queue(candidates)
    assert queue.upcoming(set(candidates), 2) == candidates[:2]
    queue.learn(candidates[0], 1.0)
    assert queue.upcoming(set(candidates), 2) == candidates[1:3]
    assert queue.upcoming({candidates[3]}, 2) == [candidates[3]]


def test_patience_ends_without_a_better_one():
    candidates = [candidate(n) for n in range(50)]
    queue = Queue(candidates)
    for number, each in enumerate(candidates):
        if queue.finished:
            break
        queue.learn(each, 1.0 if number == 3 else 2.0 + number)
    assert number == 4 + PATIENCE
    assert queue.upcoming(set(candidates), 1) == []


def test_what_is_rejected_costs_patience_too():
    candidates = [candidate(n) for n in range(50)]
    queue = Queue(candidates)
    for each in candidates[:PATIENCE]:
        assert not queue.finished
        queue.learn(each, None)
    assert queue.finished
    assert queue.best(3) == []


def test_what_is_wrong_costs_more_patience():
    candidates = [candidate(n) for n in range(50)]
    queue = Queue(candidates)
    for each in candidates[: PATIENCE // SERIOUS]:
        assert not queue.finished
        queue.learn(each, None, serious=True)
    assert queue.finished


def test_what_is_hardly_better_does_not_go_on_for_ever():
    candidates = [candidate(n) for n in range(60)]
    queue = Queue(candidates)
    tried = 0
    while not queue.finished:
        queue.learn(candidates[tried], 1.0 - tried * 1e-5)
        tried += 1
    assert tried == 1 + PATIENCE


def test_the_best_are_the_fastest_by_their_best():
    candidates = [candidate(n) for n in range(4)]
    queue = Queue(candidates)
    for each, time in zip(candidates, (3.0, 1.0, None, 2.0), strict=True):
        queue.learn(each, time)
    assert queue.best(2) == [candidates[1], candidates[3]]
    queue.learn(candidates[0], 0.5)
    assert queue.best(1) == [candidates[0]]


def test_known_candidates_at_other_steps_cost_no_patience():
    candidates = [candidate(n) for n in range(30)]
    queue = Queue(candidates)
    queue.learn(candidates[0], 1.0)
    for _ in range(2 * PATIENCE):
        queue.learn(candidates[0], 1.5)
    assert not queue.finished


def tile(m, n, k, stages):
    return Candidate("conv", Attrs(m=m, n=n, k=k, stages=stages))


TILES = (8, 16, 32, 64)
SPACE = [tile(*each) for each in itertools.product((*TILES, 128), TILES, TILES, range(1, 7))]
# A cost model that knows nothing.
random.Random(0).shuffle(SPACE)


def time_of(each):
    """The best is 64 x 32 x 32 in 4 stages."""
    best = {"m": 64, "n": 32, "k": 32, "stages": 4}
    return 1.0 + sum(abs(each.config[name] / value - 1) for name, value in best.items())


def test_a_large_space_is_sampled_after_its_first_ones():
    assert len(SPACE) > MOST_IN_ORDER
    queue, tried = Queue(SPACE, Studies(None, 0)), []
    while not queue.finished and len(tried) < 150:
        (each,) = queue.upcoming(SPACE, 1)
        assert each not in tried
        tried.append(each)
        queue.learn(each, time_of(each))
    assert tried[:TRIED_IN_ORDER] == SPACE[:TRIED_IN_ORDER]
    assert len(tried) > TRIED_IN_ORDER
    assert min(map(time_of, tried)) < min(map(time_of, SPACE[: 2 * len(tried)]))


def test_tpe_proposes_what_is_left_and_repeats_with_its_seed():
    tried = {each: time_of(each) for each in SPACE[:60]} | {SPACE[60]: None}
    left = SPACE[61:]
    found = Studies(None, 3).propose(tried, left, 8)
    assert 0 < len(found) <= 8
    assert len(set(found)) == len(found)
    assert set(found) <= set(left)
    assert found == Studies(None, 3).propose(tried, left, 8)


@pytest.mark.parametrize("wanted", [1, 5])
def test_where_tpe_finds_nothing_the_order_goes_on(wanted):
    class Silent:
        def propose(self, tried, left, wanted):
            return []

    queue = Queue(SPACE, Silent())
    for each in SPACE[:TRIED_IN_ORDER]:
        queue.learn(each, 1.0 / (1 + SPACE.index(each)))
    assert queue.upcoming(SPACE, wanted) == SPACE[TRIED_IN_ORDER : TRIED_IN_ORDER + wanted]
