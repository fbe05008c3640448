"""Optuna's studies: what they keep, what a later search reads of them, and what survives a kill."""

from __future__ import annotations

import sqlite3
import sqlite3.dbapi2
from contextlib import suppress

import optuna
import pytest
import sqlalchemy
from optuna.trial import TrialState

from plantune.base.outcome import Measured, Rejected
from plantune.plans.planner.candidates import step_candidates
from plantune.search.budget import Budget
from plantune.search.results import silent
from plantune.search.step_search import StepSearch
from plantune.search.studies import Studies, opened, storage_url


@pytest.fixture
def cluster(graph, space):
    """The candidates of one step that are compared with each other."""
    found = [c for c in step_candidates(graph, space) if c.candidate.family == "onednn_conv"]
    return [c for c in found if (c.nodes, c.cluster) == (found[0].nodes, found[0].cluster)]


@pytest.fixture
def url(tmp_path):
    return storage_url(tmp_path / "studies.db")


def measured(time_us):
    return Measured(time_us, time_us, time_us, 9, 0.0, 1.0, True)


def record(studies, cluster, index, outcome):
    relative = 1.5 if isinstance(outcome, Measured) else None
    studies.record(cluster[index], configs(cluster), outcome, relative)


def configs(cluster):
    return [c.candidate for c in cluster]


def trials_in(url):
    storage = opened(url)
    (name,) = optuna.get_all_study_names(storage)
    return optuna.load_study(study_name=name, storage=storage).trials


def test_a_time_is_complete_and_a_rejection_a_failure_with_its_reason(url, cluster):
    studies = Studies(url, seed=0)
    record(studies, cluster, 0, measured(12.5))
    record(studies, cluster, 1, Rejected("numerics", "off by one"))
    good, bad = trials_in(url)
    assert (good.state, good.value) == (TrialState.COMPLETE, 1.5)
    assert good.user_attrs["outcome"]["median_us"] == 12.5
    assert bad.state == TrialState.FAIL
    assert bad.user_attrs["outcome"]["reason"] == "off by one"


def test_a_trial_has_the_config_that_was_tried(url, cluster):
    studies = Studies(url, seed=0)
    for index in range(len(cluster)):
        record(studies, cluster, index, measured(1.0))
    assert len(cluster) > 1
    assert [t.params for t in trials_in(url)] == [dict(c.candidate.config) for c in cluster]


class TestEarlierTrials:
    """What was recorded is read by the next search of the same scope."""

    OUTCOMES = (measured(3.0), Rejected("numerics", "it is wrong"))

    @pytest.fixture
    def recorded(self, url, cluster):
        studies = Studies(url, 0, "here")
        for index, outcome in enumerate(self.OUTCOMES):
            record(studies, cluster, index, outcome)

    @pytest.mark.usefixtures("recorded")
    def test_they_are_read(self, url, cluster):
        later = Studies(url, 1, "here")
        keys = [c.key for c in cluster[: len(self.OUTCOMES)]]
        expected = dict(zip(keys, self.OUTCOMES, strict=True))
        assert later.recorded(cluster[0], configs(cluster)) == expected

    @pytest.mark.usefixtures("recorded")
    def test_of_another_scope_or_space_nothing_is(self, url, cluster):
        assert Studies(url, 0, "elsewhere").recorded(cluster[0], configs(cluster)) == {}
        assert Studies(url, 0, "here").recorded(cluster[0], configs(cluster[:1])) == {}

    @pytest.mark.usefixtures("recorded")
    def test_a_fresh_search_reads_none(self, url, cluster):
        assert Studies(url, 0, "here", fresh=True).recorded(cluster[0], configs(cluster)) == {}

    def test_noise_says_nothing_of_a_candidate(self, url, cluster):
        record(Studies(url, 0), cluster, 0, Rejected("noisy", "others ran"))
        assert Studies(url, 0).recorded(cluster[0], configs(cluster)) == {}

    def test_a_trial_of_another_program_is_passed_over(self, url, cluster):
        studies = Studies(url, 0)
        record(studies, cluster, 0, measured(1.0))
        storage = opened(url)
        (name,) = optuna.get_all_study_names(storage)
        optuna.load_study(study_name=name, storage=storage).add_trial(
            optuna.trial.create_trial(value=0.0)
        )
        assert Studies(url, 0).recorded(cluster[0], configs(cluster)) == {
            cluster[0].key: measured(1.0)
        }

    def test_a_search_without_a_database_goes_on_from_them(
        self, url, graph, space, measurer, store
    ):
        first = StepSearch(graph, space, measurer, store, studies=Studies(url, 0))
        first.run(Budget(600.0), silent)
        known = set(measurer.asked)
        measurer.asked.clear()
        again = StepSearch(graph, space, measurer, type(store)(), studies=Studies(url, 0))
        assert again.costs.outcomes == first.costs.outcomes
        again.run(Budget(600.0), silent)
        assert known.isdisjoint(measurer.asked)


def test_another_space_is_another_study(url, cluster):
    studies, other = Studies(url, seed=0), Studies(url, seed=0)
    record(studies, cluster, 0, measured(1.0))
    record(other, cluster[:1], 0, measured(1.0))
    assert len(optuna.get_all_study_names(opened(url))) == 2


def test_a_storage_that_fails_is_given_up_and_the_search_goes_on(tmp_path, cluster):
    """The file is damaged while it is in use."""
    path = tmp_path / "studies.db"
    studies = Studies(storage_url(path), seed=0)
    record(studies, cluster, 0, measured(1.0))
    path.write_bytes(b"no database any more" * 1000)
    with pytest.warns(UserWarning, match="Optuna's storage failed"):
        record(studies, cluster, 1, measured(1.0))
    record(studies, cluster, 0, measured(1.0))


@pytest.mark.parametrize("content", [b"", b"no database at all " * 100])
def test_no_connection_stays_open(tmp_path, cluster, monkeypatch, content):
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
        record(Studies(storage_url(path), seed=0), cluster, 0, measured(1.0))
    assert opened_now
    for connection in opened_now:
        with pytest.raises(sqlite3.ProgrammingError, match="closed database"):
            connection.total_changes  # noqa: B018
