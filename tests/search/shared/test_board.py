"""The study that searches share, on PostgreSQL and in an SQLite file: nothing is measured twice,
and what a dead search had is free.
"""

from __future__ import annotations

import os
import secrets
import threading
from dataclasses import replace
from types import SimpleNamespace

import optuna
import pytest
import sqlalchemy

from plantune.base.canonical import Attrs
from plantune.base.outcome import Measured, Rejected
from plantune.devices.machine import cpu_environment
from plantune.errors import ForeignSearch
from plantune.kernels.family import Candidate
from plantune.search.results import Patience
from plantune.search.shared.board import Board
from plantune.search.shared.board_rows import TRIAL, SharedSearch, rows_of
from plantune.search.shared.rdb import Persistent, close_shared, opened_shared, with_driver
from plantune.search.shared.status import statuses

from .postgres import PASSWORD

GOOD = Measured(5.0, 4.0, 6.0, 9, 1e-7, 1e-6, True)
WRONG = Rejected("numerics", "it is wrong")
# The URL of a database, in which studies are left.
MYSQL = os.environ.get("PLANTUNE_TEST_MYSQL", "")


class Hasty(Patience):
    """A search is silent after two seconds."""

    silent_s = 2
    gone_s = 20.0


def item(number: int) -> SimpleNamespace:
    return SimpleNamespace(key=(f"step {number}", Candidate("family", Attrs(tile=number))))


@pytest.fixture(params=["postgresql", "sqlite", *(["mysql"] if MYSQL else [])])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/shared.db"
    if request.param == "postgresql":
        return with_driver(request.getfixturevalue("postgres").url)
    return with_driver(MYSQL)


@pytest.fixture
def board(url):
    """Makes boards of searches for one thing, each with connections of its own."""
    made, name = [], f"net {secrets.token_hex(4)}"

    def make(environment=None, patience=None, gone_s=20.0, fresh=False):
        patience = patience or Patience(30)
        does = Persistent(url, gone_s, said.append)
        place = SharedSearch(opened_shared(url, patience), name, patience)
        new = Board(place, environment or cpu_environment(), does, said.append)
        made.append(new)
        new.join(fresh=fresh)
        return new

    said: list[str] = []
    make.said = said
    yield make
    for each in made:
        each.leave()
        close_shared(each._storage)


def rows(board):
    return [row for row in board._rows() if row.role == TRIAL]


def test_what_one_claimed_no_other_gets_and_its_outcome_reaches_all(board):
    one, other = board(), board()
    assert one.claim(item(1))
    assert not other.claim(item(1))
    assert other.has(item(1))
    assert not one.has(item(1))
    assert other.new_outcomes() == []
    one.report(item(1), GOOD)
    assert other.new_outcomes() == [(item(1).key, GOOD)]
    assert other.new_outcomes() == []
    assert not other.has(item(1))
    assert one.new_outcomes() == []
    assert other.claim(item(2))
    other.report(item(2), WRONG)
    assert one.new_outcomes() == [(item(2).key, WRONG)]


def test_of_several_that_are_claimed_together_each_counts_for_itself(board):
    one, other = board(), board()
    assert other.claim(item(2))
    assert [i.key for i in one.claim(item(1), item(2), item(3))] == [item(1).key, item(3).key]
    assert one.has(item(2))
    one.report(item(3), GOOD)
    assert other.new_outcomes() == [(item(3).key, GOOD)]
    assert other.has(item(1))
    assert not other.claim(item(1), item(3))
    one.leave()  # what was reported stays, the rest is free
    assert other.new_outcomes() == []
    assert [i.key for i in other.claim(item(1), item(3))] == [item(1).key]


def test_a_claim_that_was_given_back_is_free(board):
    one, other = board(), board()
    assert one.claim(item(1))
    one.report(item(1), None)
    assert other.new_outcomes() == []
    assert other.claim(item(1))


def test_of_many_that_claim_at_once_one_gets_it(board):
    boards = [board() for _ in range(3)]
    won = {number: [] for number in range(8)}
    start = threading.Barrier(len(boards))

    def claim_all(own):
        start.wait(60)
        for number, winners in won.items():
            if own.claim(item(number)):
                winners.append(own)
                own.report(item(number), GOOD)

    threads = [threading.Thread(target=claim_all, args=(own,)) for own in boards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [len(winners) for winners in won.values()] == [1] * len(won)
    found = [key for row in rows(boards[0]) for key, _ in row.reported]
    assert sorted(found, key=repr) == sorted((item(n).key for n in won), key=repr)


def silence(board, other, eventually):
    """Lets the other one see that this one is silent."""

    def is_over():
        other.beat({})
        other.new_outcomes()
        return not any(row.is_open and row.id == board._me.id for row in other._rows())

    eventually(is_over, "a silent search is ended")
    other.new_outcomes()


def test_what_a_silent_search_had_is_free_and_its_late_outcome_dropped(board, eventually):
    other, stopped = board(patience=Hasty(1)), board()
    assert stopped.claim(item(1))
    silence(stopped, other, eventually)
    assert other.claim(item(1))
    stopped.report(item(1), WRONG)
    other.report(item(1), GOOD)
    assert [outcome for row in rows(other) for _, outcome in row.reported] == [GOOD]
    assert stopped.new_outcomes() == [(item(1).key, GOOD)]  # it goes on
    assert any("silent for too long" in text for text in board.said)
    assert stopped.claim(item(2))
    assert not other.claim(item(2))


def ended_at_once(board, other):
    """Whatever the board adds, another one ends: it was stopped for long right then."""
    add = type(board)._add

    def added(*given):
        id = add(board, *given)
        other._end(id)
        return id

    return added


def test_a_search_that_was_silent_in_the_middle_of_a_claim_goes_on(board, monkeypatch):
    one, other = board(), board()
    with monkeypatch.context() as patch:
        patch.setattr(one, "_add", ended_at_once(one, other))
        assert one.claim(item(1)) == []
        other.leave()
        one.wait_for_turn()
        assert one.turn() is False
    assert one.claim(item(1))
    assert one.turn() is True


def test_no_text_is_longer_than_a_database_keeps(board):
    """MySQL refuses more than 65,535 bytes, and a search would end."""
    one, other = board(), board()
    many = [item(number) for number in range(200)]
    for each in many:
        each.key = each.key[0], Candidate("family", Attrs(name='"' * 300))
    claimed = one.claim(*many)
    assert 20 < len(claimed) < 200
    assert other.claim(*many[: len(claimed)]) == []
    assert len(one.claim(*many[len(claimed) :])) >= 20
    other.wait_for_turn()
    one.wait_for_turn()
    assert one.turn() is True
    one.publish('"' * 100_000, 1.0)
    assert other.turn() == '"' * 100_000
    texts = "SELECT MAX(LENGTH(value_json)) FROM trial_user_attributes"
    with one._storage._backend.engine.connect() as connection:
        assert connection.execute(sqlalchemy.text(texts)).scalar() < 65_536


def test_a_search_that_was_killed_before_its_first_heartbeat_is_ended(board, eventually):
    other = board(patience=Hasty(1))
    killed = other._add("search", {"host": "h", "pid": 1, "environment": {}, "phase": "x"}, 0)

    def is_over():
        other.beat({})
        return not any(row.id == killed and row.is_open for row in other._rows())

    eventually(is_over, "a search without a heartbeat is ended")


def test_searches_begin_at_different_candidates(board):
    boards = [board() for _ in range(3)]
    for each in boards:
        each.new_outcomes()
    assert [each.searches for each in boards] == [3, 3, 3]
    orders = [each.spread([item(n) for n in range(6)]) for each in boards]
    assert [order[0].key for order in orders] == [item(n).key for n in (0, 2, 4)]
    assert all({i.key for i in order} == {item(n).key for n in range(6)} for order in orders)


def test_one_ranks_once_all_have_measured_and_all_get_its_plan(board):
    one, other = board(), board()
    one.wait_for_turn()
    assert one.turn() is False  # the other one still measures
    other.wait_for_turn()
    assert other.turn() is True
    assert one.turn() is False
    plan = "x" * 70_000
    other.publish(plan, 1.5)
    assert one.turn() == other.turn() == plan


def test_who_looks_before_a_plan_is_there_and_claims_after_it_takes_that_plan(board, monkeypatch):
    one, other = board(), board()
    for each in (one, other):
        each.wait_for_turn()
    add = one._add

    def add_late(*given):
        assert [other.turn(), other.publish("theirs", 1.0)] == [True, True]
        return add(*given)

    monkeypatch.setattr(one, "_add", add_late)
    assert one.turn() == "theirs"
    assert not any(row.is_open for row in one._rows() if row.role == "rank")


def test_who_was_silent_while_it_ranked_cannot_publish(board, eventually):
    one, other = board(patience=Hasty(1)), board(patience=Hasty(1))
    for each in (one, other):
        each.wait_for_turn()
    assert one.turn() is True
    silence(one, other, eventually)
    other.new_outcomes()
    assert other.turn() is True
    assert one.publish("mine", 1.0) is False
    assert other.publish("theirs", 1.0)
    assert one.turn() == "theirs"


def test_another_one_ranks_if_the_first_leaves_or_is_silent(board, eventually):
    third, one, other = board(patience=Hasty(1)), board(), board()
    for each in (one, other, third):
        each.wait_for_turn()
    assert one.turn() is True
    assert other.turn() is False
    one.leave()
    assert other.turn() is True
    assert third.turn() is False
    silence(other, third, eventually)
    third.new_outcomes()
    assert third.turn() is True


def test_a_search_on_another_machine_or_software_is_refused(board):
    board()
    there = replace(cpu_environment(), torch="1.0", system="another")
    with pytest.raises(ForeignSearch, match=r"torch there is .*, here 1\.0") as caught:
        board(there)
    assert PASSWORD not in str(caught.value)
    assert board() is not None


def test_the_next_search_knows_what_the_last_one_found(board):
    first = board()
    for number, outcome in ((1, GOOD), (2, WRONG)):
        first.claim(item(number))
        first.report(item(number), outcome)
    first.claim(item(3))
    first.leave()
    assert board().new_outcomes() == [(item(1).key, GOOD), (item(2).key, WRONG)]


def test_after_all_looked_silent_a_new_search_joins_those_that_come_back(board, eventually):
    """As when the database was gone for longer than a search may be silent."""
    watching, one = board(patience=Hasty(1)), board()
    silence(one, watching, eventually)
    watching.leave()
    new = board()
    assert new._study.study_name == one._study.study_name
    one.new_outcomes()
    assert one.claim(item(1))
    assert not new.claim(item(1))


def test_a_fresh_search_knows_nothing(board):
    first = board()
    first.claim(item(1))
    first.report(item(1), GOOD)
    first.leave()
    assert board(fresh=True).new_outcomes() == []


def test_another_machine_begins_anew_after_the_last_search_is_over(board):
    first = board()
    first.claim(item(1))
    first.report(item(1), GOOD)
    first.leave()
    assert board(replace(cpu_environment(), torch="1.0")).new_outcomes() == []


@pytest.mark.parametrize("done", [False, True])
def test_what_may_have_been_written_before_a_connection_broke_does_no_harm(board, done):
    one, other = board(), board()
    for name in ("create_new_trial", "set_trial_state_values"):
        real, broken = getattr(one._storage, name), []

        def fails_once(*given, real=real, broken=broken):
            if not broken:
                broken.append(real(*given) if done else None)
                raise optuna.exceptions.StorageInternalError("the connection broke")
            return real(*given)

        setattr(one._storage, name, fails_once)
    assert one.claim(item(1))
    one.report(item(1), GOOD)
    assert other.new_outcomes() == [(item(1).key, GOOD)]
    assert not [row for row in rows(other) if row.is_open]


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_a_restart_of_the_database_loses_nothing(postgres, board):
    one = board()
    assert one.claim(item(1))
    postgres.restart()
    one.report(item(1), GOOD)
    postgres.restart()
    assert one.claim(item(2))
    assert [outcome for row in rows(one) for _, outcome in row.reported] == [GOOD]
    assert any("waiting up to 20 s" in text for text in board.said)
    assert not any(PASSWORD in text for text in board.said)


def test_the_status_is_seen_from_anywhere(url, board, eventually):
    one, other = board(), board()
    one.beat({"phase": "measuring", "measured": 1, "detail": "conv"})
    for number, outcome in ((1, GOOD), (2, WRONG), (3, None)):
        one.claim(item(number))
        one.report(item(number), outcome)
    other.claim(item(4))
    name = one._study.study_name
    does = Persistent(url, 0.0, board.said.append)

    def status():
        return next(s for s in statuses(url, does, Patience(10)) if s.name == name)

    seen = status()
    assert (seen.measured, seen.rejected, seen.running) == (1, 1, 1)
    assert [member.measured for member in seen.members] == [2, 0]
    assert seen.state == "goes on"
    for each in (one, other):
        each.wait_for_turn()
    assert one.turn() is True
    one.publish("{}", 0.25)
    assert (status().median_ms, status().state) == (0.25, "done")
    for each in (one, other):
        each.leave()
    assert {member.state for member in status().members} == {"ended"}


def test_rows_that_others_wrote_are_left_alone(url, board):
    one = board()
    study = optuna.load_study(study_name=one._study.study_name, storage=one._storage)
    study.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState.COMPLETE, value=1.0))
    assert one.new_outcomes() == []
    assert one.claim(item(1))
    assert len(list(rows_of(study.trials))) == len(study.trials) - 1
