"""What the tools import of the package is there: most of them run on a GPU alone."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.mark.parametrize("file", sorted(TOOLS.rglob("*.py")), ids=lambda file: file.name)
def test_names_that_tools_import(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("plantune"):
            room = importlib.import_module(str(node.module))
            for name in (alias.name for alias in node.names):
                if not hasattr(room, name):
                    importlib.import_module(f"{node.module}.{name}")
