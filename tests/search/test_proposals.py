"""Optuna keeps the ledger: what it is told, and what survives a kill."""

from __future__ import annotations

import sqlite3
import sqlite3.dbapi2
from contextlib import suppress

import optuna
import pytest
import sqlalchemy
from optuna.trial import TrialState

from plantune.graph.partition import one_by_one
from plantune.kernels.registry import candidates
from plantune.measure.outcome import Measured, Rejected
from plantune.search.proposals import Ledger, opened, storage_url


@pytest.fixture
def step(graph):
    return next(step for step in one_by_one(graph) if step.ops == ("conv2d",))


@pytest.fixture
def choices(step, space):
    return candidates(step, space)


def measured(time_us):
    return Measured(time_us, time_us, time_us, 9, 0.0, 1.0, True)


def trials_in(url):
    storage = opened(url)
    (name,) = optuna.get_all_study_names(storage)
    return optuna.load_study(study_name=name, storage=storage).trials


def test_a_time_is_complete_and_a_rejection_a_failure_with_its_reason(tmp_path, step, choices):
    url = storage_url(tmp_path / "studies.db")
    ledger = Ledger(url, seed=0)
    ledger.keep(step, choices[0], choices, measured(12.5))
    ledger.keep(step, choices[1], choices, Rejected("numerics", "off by one"))
    good, bad = trials_in(url)
    assert (good.state, good.value) == (TrialState.COMPLETE, 12.5)
    assert bad.state == TrialState.FAIL
    assert bad.user_attrs == {"stage": "numerics", "reason": "off by one"}


def test_the_trial_is_of_the_candidate_that_was_asked_for(tmp_path, step, choices):
    url = storage_url(tmp_path / "studies.db")
    ledger = Ledger(url, seed=0)
    for choice in choices:
        ledger.keep(step, choice, choices, measured(1.0))
    texts = [trial.params["candidate"] for trial in trials_in(url)]
    assert len(set(texts)) == len(choices)
    for text, choice in zip(texts, choices, strict=True):
        assert choice.family in text


def test_another_space_is_another_study(tmp_path, step, choices):
    url = storage_url(tmp_path / "studies.db")
    ledger = Ledger(url, seed=0)
    ledger.keep(step, choices[0], choices, measured(1.0))
    ledger.keep(step, choices[0], choices[:2], measured(1.0))
    assert len(optuna.get_all_study_names(opened(url))) == 2


def test_a_storage_that_fails_is_given_up_and_the_search_goes_on(tmp_path, step, choices):
    """F28: the file is damaged while it is in use."""
    path = tmp_path / "studies.db"
    ledger = Ledger(storage_url(path), seed=0)
    ledger.keep(step, choices[0], choices, measured(1.0))
    path.write_bytes(b"no database any more" * 1000)
    with pytest.warns(UserWarning, match="Optuna's storage failed"):
        ledger.keep(step, choices[1], choices, measured(1.0))
    ledger.keep(step, choices[0], choices, measured(1.0))


@pytest.mark.parametrize("content", [b"", b"no database at all " * 100])
def test_no_connection_stays_open(tmp_path, step, choices, monkeypatch, content):
    """Also where the file is damaged. Python 3.13 warns of each that does."""
    opened_now: list[sqlite3.Connection] = []
    connect = sqlite3.dbapi2.connect

    def spy(*arguments, **options):
        opened_now.append(connect(*arguments, **options))
        return opened_now[-1]

    monkeypatch.setattr(sqlite3.dbapi2, "connect", spy)
    path = tmp_path / "studies.db"
    path.write_bytes(content)
    with suppress(optuna.exceptions.StorageInternalError, sqlalchemy.exc.SQLAlchemyError):
        Ledger(storage_url(path), seed=0).keep(step, choices[0], choices, measured(1.0))
    assert opened_now
    for connection in opened_now:
        with pytest.raises(sqlite3.ProgrammingError, match="closed database"):
            connection.total_changes  # noqa: B018
