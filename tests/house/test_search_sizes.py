"""The search reads like its docstrings: short functions, and files that know few others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import plantune

FOLDER = Path(plantune.__file__).parent / "search"
FILES = sorted(FOLDER.rglob("*.py"))
# From `def` to its end, with the docstring.
MOST_LINES = 25
# Of plantune's own modules; a line that imports several of a folder counts once.
MOST_IMPORTS = 15


def long_functions(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MOST_LINES:
                yield f"{node.name} has {lines} lines"


def imports(text: str) -> list[str]:
    """The modules of plantune's that a file imports, wherever and for whatever it does."""
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom))
    return [str(node.module) for node in nodes if str(node.module).startswith("plantune")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_functions_are_short_and_files_know_few_others(path: Path) -> None:
    text = path.read_text("utf-8")
    assert list(long_functions(text)) == []
    assert len(imports(text)) <= MOST_IMPORTS


def test_what_is_longer_is_found() -> None:
    text = "def f():\n" + MOST_LINES * "    pass\n" + "    from plantune.search import run\n"
    assert list(long_functions(text)) == [f"f has {MOST_LINES + 2} lines"]
    assert imports(text + "import plantune\nfrom os import path\n") == ["plantune.search"]
