"""What every test has: one seed, so that a failure repeats, and a cache that is no user's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture(scope="session")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled kernels of this run, which all of its processes and tests share."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "binaries"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory, binaries: Path) -> Iterator[None]:
    """Kernels and plans of this run only: what a user searched for decides no test."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "cuda").symlink_to(binaries)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "PLANTUNE_CACHE_DIR", str(folder))
        yield
