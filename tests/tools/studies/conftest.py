from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from ...conftest import ROOT

Part = Callable[[str], ModuleType]


@pytest.fixture
def part(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Part]:
    """A module, by its name, of the tool after which the test's folder is named."""
    tool = ROOT / "tools" / "studies" / request.path.parent.name
    monkeypatch.syspath_prepend(str(tool))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if (tool / f"{name}.py").exists():
            del sys.modules[name]
