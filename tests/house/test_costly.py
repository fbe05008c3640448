"""The list of what a quick run leaves out names tests that are there."""

from __future__ import annotations

import ast
from functools import cache

import pytest
from hypothesis import HealthCheck, settings

from ..conftest import ROOT, Costly, costly_tests


@cache
def statements_of(file: str) -> list[ast.stmt]:
    return ast.parse((ROOT / file).read_text()).body if (ROOT / file).is_file() else []


def is_there(name: str) -> bool:
    file, *path = name.split("::")
    body = statements_of(file)
    if not body:
        return False
    for part in path:
        found = [
            node
            for node in body
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part
        ]
        if not found:
            return False
        bases = found[0].bases if isinstance(found[0], ast.ClassDef) else []
        body = [*found[0].body, *(inherited() if bases else [])]
    return True


@cache
def inherited() -> list[ast.stmt]:
    """What a class with a base has of that, which is the contract of kernel families."""
    classes = statements_of("tests/kernels/families/contract.py")
    return [each for one in classes if isinstance(one, ast.ClassDef) for each in one.body]


def test_each_is_there() -> None:
    """Where a test has another name now, or is gone, its line follows."""
    assert [name for name in costly_tests() if not is_there(name)] == []


@pytest.mark.parametrize(("one_of", "runs"), [(None, []), (3, [0, 3])])
def test_of_a_long_table_some_cases_run(one_of: int | None, runs: list[int]) -> None:
    assert [case for case in range(5) if Costly(1.0, one_of).runs(case)] == runs


def test_no_example_of_hypothesis_is_too_slow() -> None:
    """A busy machine makes any of them slow."""
    assert settings.default is not None
    assert settings.default.deadline is None
    assert HealthCheck.too_slow in settings.default.suppress_health_check
