"""The count that moves with each change of watched dicts."""

from __future__ import annotations

import sys
from collections import OrderedDict

import pytest
import torch
from torch import nn

from plantune.runtime.watched import epoch
from plantune.runtime.watched.live_state import Watched

CHANGES = [
    lambda d: d.update(a=2),
    lambda d: d.update(b=2),
    lambda d: d.__setitem__("a", 1.0),
    lambda d: d.pop("a"),
    lambda d: d.clear(),
    lambda d: d.__setitem__("c", None),
]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python has dict watchers from 3.12 on")
@pytest.mark.parametrize("kind", [dict, OrderedDict])
@pytest.mark.parametrize("change", CHANGES)
def test_each_kind_of_change_moves_it(kind, change):
    watched, other = kind(a=1), kind(a=1)
    assert epoch.watch([watched])
    before = epoch.count
    change(other)
    assert epoch.count == before
    change(watched)
    assert epoch.count > before


@pytest.mark.parametrize("counted", [True, False])
class TestWatched:
    @pytest.fixture(autouse=True)
    def _way(self, counted, monkeypatch):
        if not counted:
            monkeypatch.setattr(epoch, "_watcher", lambda: None)

    def test_nothing(self, counted):
        watched = Watched([{"a": 1}, {}])
        assert not watched.changed()
        assert not watched.changed()

    def test_a_change_of_something_else(self, counted):
        """Counted changes have all look, but make no other module another one."""
        watched, others = Watched([{"a": 1}]), {"a": 1}
        Watched([others])
        for value in range(3):
            others["a"] = value + 2
            assert not watched.changed()

    @pytest.mark.parametrize("change", [c for c in CHANGES if c is not CHANGES[2]])
    def test_values(self, change, counted):
        values = {"a": 1}
        watched = Watched([values, {}])
        change(values)
        assert watched.changed()

    def test_tensors_are_told_apart_though_they_are_equal(self, counted):
        tensors = {"w": nn.Parameter(torch.ones(1))}
        watched = Watched([tensors], tensors=True)
        tensors["w"] = nn.Parameter(torch.ones(1))
        assert watched.changed()

    def test_values_that_cannot_be_compared(self, counted):
        values = {"a": torch.ones(2)}
        watched = Watched([values])
        values["a"] = torch.ones(2)
        assert watched.changed()
