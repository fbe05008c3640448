"""What stands in for `plantune.search.session.Search` in tests that measure nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plantune.search.sought import Sought


@dataclass
class GivenSearch:
    """Knows what a search is made for."""

    sought: Sought
    options: Any
    database: Any
    here: Any
    report: Any
    board: Any = None
