from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from ....conftest import ROOT

TOOL = ROOT / "tools" / "studies" / "proofs"
Part = Callable[[str], ModuleType]


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Iterator[Part]:
    """A module of the tool, by its name."""
    monkeypatch.syspath_prepend(str(TOOL))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if (TOOL / f"{name}.py").exists():
            del sys.modules[name]
