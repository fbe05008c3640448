"""A cache folder that cannot be written is read all the same."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from plantune import optimize
from plantune.base import paths
from plantune.base.canonical import Attrs
from plantune.base.outcome import Measured
from plantune.base.paths import cache_file, cache_folder, writable_folder
from plantune.devices.machine import environment_of
from plantune.errors import DatabaseWarning, ReadOnlyDatabase
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.kernels.cpu import cxx
from plantune.kernels.family import Candidate
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.proofs import is_proved, remember_proof
from plantune.plans.database.stored import find_stored_plan
from plantune.plans.guess import COMPILED, hand_plan
from plantune.search.keeping import KeepingDatabase
from plantune.space.search_space import load_search_space

from ...permissions import write_protected

HERE = environment_of(torch.device("cpu"))
TRIAL = ("step", Candidate("gemm", Attrs(layout="nchw")))
OUTCOME = Measured(1.0, 1.0, 1.0, 9, 0.0, 1.0, True, cache="cold")
ELSEWHERE = r"cannot be written .*it is read-only.*PLANTUNE_CACHE_DIR"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x):
        return torch.relu(self.linear(x))


@pytest.fixture(scope="module")
def net():
    return Net().eval()


@pytest.fixture(scope="module")
def plan(net):
    graph = extract(net, TensorType((3, 6)))
    return hand_plan(graph, load_search_space("cpu"), network="Net", without=COMPILED)


@pytest.fixture
def folder(tmp_path, monkeypatch, plan):
    """A cache folder that cannot be written, with a plan, a trial and a proof."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(folder))
    with PlanDatabase.open() as database:
        database.put_plan(plan, HERE)
        database.put_trial(*TRIAL, HERE, OUTCOME)
    remember_proof(plan, HERE)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with write_protected(folder):
        with pytest.raises(OSError, match="denied"):
            (folder / "new").touch()
        yield folder
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.fixture
def silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.usefixtures("silent")
def test_what_is_there_is_found_without_a_warning(folder, plan):
    assert cache_folder() == folder
    found = find_stored_plan(plan.problem, HERE)
    assert (found.plan, found.match) == (plan, "exact")
    assert is_proved(plan, HERE)
    assert cache_file("cpu", "nothing") == folder / "cpu" / "nothing"


def test_a_stored_plan_runs_a_module(folder, plan, net):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuned = optimize(net, torch.zeros(3, 6))
        x = torch.randn(3, 6)
        torch.testing.assert_close(tuned(x), net(x))
    assert [pool.plan for pool in tuned.pools()] == [plan]


def test_the_database_is_open_for_reading_and_that_is_said_once(folder, plan):
    with pytest.warns(UserWarning, match=ELSEWHERE) as caught:
        database = PlanDatabase.open()
    assert len(caught) == 1
    with database:
        assert [stored.plan for stored in database.plans()] == [plan]
        assert database.trials(TRIAL[0], HERE) == {TRIAL[1]: OUTCOME}
        with pytest.raises(ReadOnlyDatabase):
            database.put_trial(*TRIAL, HERE, OUTCOME)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PlanDatabase.open().close()
        remember_proof(plan, HERE)


def test_a_search_reads_it_and_goes_on_in_memory(folder, plan):
    said = []
    with pytest.warns(UserWarning, match=ELSEWHERE):
        database = PlanDatabase.open()
    with database:
        keeping = KeepingDatabase(database, said.append)
        assert keeping.trials(TRIAL[0], HERE) == {TRIAL[1]: OUTCOME}
        assert keeping.find_plan(plan.problem, HERE).plan == plan
        keeping.put_trial("other", TRIAL[1], HERE, OUTCOME)
        assert keeping.trials("other", HERE) == {TRIAL[1]: OUTCOME}
        keeping.put_plan(plan, HERE)
        assert keeping.plan_id is None
    assert said == []


def test_another_unwritable_database_is_named(folder, tmp_path, plan):
    path = tmp_path / "other" / "mine.db"
    with PlanDatabase.open(path) as database:
        database.put_plan(plan, HERE)
    with write_protected(path.parent), pytest.warns(DatabaseWarning, match="open for reading only"):
        database = PlanDatabase.open(path)
    with database:
        assert [stored.plan for stored in database.plans()] == [plan]


def test_what_is_made_lies_elsewhere_until_the_process_ends(folder, plan):
    other = hand_plan(
        extract(Net().eval(), TensorType((4, 6))), load_search_space("cpu"), network="Net"
    )
    with pytest.warns(UserWarning, match=ELSEWHERE) as caught:
        remember_proof(other, HERE)
    assert len(caught) == 1
    assert is_proved(other, HERE)
    assert is_proved(plan, HERE)
    assert writable_folder() != folder
    assert paths.is_passing(writable_folder())
    assert cache_folder() == folder


SOURCE = '#include <cstdint>\nextern "C" int64_t seven() { return 7; }\n'


def test_a_compiled_library_is_loaded_from_there(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(folder))
    monkeypatch.setattr(cxx, "cxx_compiler", lambda: "g++")
    monkeypatch.setattr(cxx, "_key", lambda source, compiler: "key")
    compiled = []
    monkeypatch.setattr(cxx, "_compiled", lambda *given: compiled.append(1) or b"a library")
    monkeypatch.setattr(cxx, "_loaded", lambda content: content)
    assert cxx.load_library(SOURCE) == b"a library"
    with write_protected(folder), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cxx.load_library(SOURCE) == b"a library"
        assert len(compiled) == 1
        monkeypatch.setattr(cxx, "_key", lambda source, compiler: "another")
    with write_protected(folder), pytest.warns(UserWarning, match=ELSEWHERE):
        assert cxx.load_library(SOURCE) == b"a library"
    with write_protected(folder):
        assert cxx.load_library(SOURCE) == b"a library"
    assert len(compiled) == 2
    assert os.listdir(folder / "cpu") == ["key.so"]


def test_root_is_a_user_like_others_here(tmp_path: Path):
    with write_protected(tmp_path):
        assert not paths.can_write(tmp_path)
        with pytest.raises(PermissionError):
            (tmp_path / "file").touch()
    assert paths.can_write(tmp_path)
    (tmp_path / "file").touch()
