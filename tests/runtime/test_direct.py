"""Which addresses get a graph of their own."""

from __future__ import annotations

import pytest

from plantune.runtime.direct import DIRECT_AFTER, MOST_COUNTED, MOST_DIRECT, DirectPasses, Pass

MADE = Pass(None, {})


def place(number):
    return (number,)


@pytest.fixture
def passes():
    return DirectPasses()


def dues(passes, addresses, calls):
    return [passes.is_due(addresses) for _ in range(calls)]


def test_it_is_due_when_addresses_came_often(passes):
    assert dues(passes, place(1), DIRECT_AFTER + 1) == [False] * DIRECT_AFTER + [True]


def test_each_is_counted_for_itself(passes):
    for _ in range(DIRECT_AFTER):
        assert not passes.is_due(place(1))
        assert not passes.is_due(place(2))
    assert passes.is_due(place(1))
    assert passes.is_due(place(2))


def test_addresses_that_never_come_again_take_no_memory(passes):
    for number in range(100 * MOST_COUNTED):
        assert not passes.is_due(place(number))
    assert len(passes._calls) <= MOST_COUNTED


def test_inputs_in_turns_get_theirs_though_no_output_comes_again(passes):
    due = [number % 8 for number in range(10 * DIRECT_AFTER) if passes.is_due(place(number % 8))
           or passes.is_due((number % 8, 1000 + number))]  # fmt: skip
    assert set(due) == set(range(8))


def test_there_are_only_so_many(passes):
    for number in range(MOST_DIRECT):
        passes.made[place(number)] = MADE
    assert not any(dues(passes, place(99), 2 * DIRECT_AFTER))


def test_none_is_due_where_one_could_not_be_made(passes):
    passes.made[place(1)] = MADE
    passes.stop()
    assert not any(dues(passes, place(2), 2 * DIRECT_AFTER))


def test_cleared_it_counts_from_the_start(passes):
    passes.made[place(1)] = MADE
    dues(passes, place(2), DIRECT_AFTER)
    passes.clear()
    assert not passes.made
    assert not passes.is_due(place(2))
