"""What the tests of the backend share: each begins without what Dynamo captured before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from weakref import WeakSet

import pytest
import torch

import plantune.backend
from plantune.backend import piece


@pytest.fixture(autouse=True, scope="session")
def _named() -> None:
    """Where the project is not installed, no entry point has told torch the name."""
    if "plantune" not in torch._dynamo.list_backends():
        torch._dynamo.register_backend(plantune.backend.plantune, name="plantune")


@pytest.fixture(autouse=True)
def _alike_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """One seed, and no plan that somebody stored on this machine."""
    torch.manual_seed(0)
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(piece, "_alive", WeakSet())
    yield
    torch._dynamo.reset()
