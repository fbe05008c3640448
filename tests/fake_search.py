"""What stands in for `plantune.search.session.Search` in tests that measure nothing."""

from __future__ import annotations

from typing import Any

GIVEN = ("graph", "problem", "options", "database", "here", "report")


class GivenSearch:
    """Knows what a search is made for."""

    graph: Any
    problem: Any
    options: Any
    database: Any
    here: Any
    report: Any

    def __init__(self, *given: Any, tape: Any = None) -> None:
        vars(self).update(zip(GIVEN, given, strict=True))
        self.tape = tape
