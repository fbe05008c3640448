"""What every test has: one seed, so that a failure repeats, and a cache that is no user's."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels and plans of this run only: what a user searched for decides no test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "PLANTUNE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
