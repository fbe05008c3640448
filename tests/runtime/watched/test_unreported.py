"""Changes of Python's state that nothing reports: right after `refresh()`, as README's Limits say.

Weights that change so are in test_state.py and test_same_address.py.
"""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn

from plantune import optimize
from plantune.runtime.watched.module_signature import MOST_WATCHED

FOREIGN = types.SimpleNamespace(gain=2.0)


def closed_over():
    gain = [2.0]

    def scale():
        return gain[0]

    return scale


class Gained(nn.Module):
    of_the_class = 2.0

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.scale = closed_over()
        self.foreign = FOREIGN
        self.long = [2.0] * (MOST_WATCHED + 1)
        self.equal = 1
        self.own = 2.0

    def by_method(self):
        return 2.0

    def forward(self, x):
        gains = self.scale() * self.foreign.gain * self.long[0] * self.of_the_class * self.own
        kind = 2.0 if self.equal is True else 3.0
        return self.conv(x) * gains * self.by_method() * kind


class Other(Gained):
    def by_method(self):
        return 5.0


CHANGES = {
    "a foreign object": lambda m: setattr(m.foreign, "gain", 3.0),
    "a long container": lambda m: m.long.__setitem__(0, 3.0),
    "an attribute of the class": lambda m: setattr(type(m), "of_the_class", 3.0),
    "a method of the class": lambda m: setattr(type(m), "by_method", lambda self: 3.0),
    "the class": lambda m: setattr(m, "__class__", Other),
    "the dict of attributes": lambda m: setattr(m, "__dict__", {**vars(m), "own": 3.0}),
}
if sys.version_info < (3, 12):  # later ones report it
    CHANGES["an equal value"] = lambda m: setattr(m, "equal", True)


@pytest.fixture
def module(monkeypatch):
    monkeypatch.setattr(FOREIGN, "gain", 2.0)
    for name in ("of_the_class", "by_method"):
        monkeypatch.setattr(Gained, name, vars(Gained)[name])
    return Gained().eval()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_it_counts_after_a_refresh(change, module, images, close):
    model = optimize(module, images)
    with torch.no_grad():
        before = model(images)
        change(model.reference)
        model.refresh()
        for _ in range(2):
            after = model(images)
            close(after, model.reference(images))
    assert not torch.allclose(after, before)
    assert model.last_call().how == "planned"


def test_a_function_that_holds_what_changes(module, images, close):
    """The copy's function holds a list of its own."""
    model = optimize(module, images)
    model(images)
    held = model.reference.scale.__closure__[0].cell_contents
    held[0] = 7.0
    model.refresh()
    close(model(images), model.reference(images))
