"""The folders and modules of the package have an order: each imports only from those before it.

An import inside a function counts, and so does one for type checkers alone: who names a type of a
later folder knows that folder.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import plantune

ROOT = Path(plantune.__file__).parent
# Those of one line know nothing of each other.
ORDER = (
    "atomic_files errors nearest scans storage_urls tolerances verdict",
    "given warning",
    "blobs canonical distance host layers op_mode outcome products rivals scopes",
    "settings standing",
    "files generators jsonable models paths",
    "build_log graph space",
    "cuda layouts problem",
    "device machine",
    "gpus",
    "workload",
    "kernels",
    "step_times",
    "plan",
    "plan_db",
    "default_plans",
    "runtime",
    "training",
    "measure",
    "search",
    "report",
    "tuning",
    "backend cli",
)
LEVEL = {part: level for level, line in enumerate(ORDER) for part in line.split()}
# The names that users import, and `python -m plantune`.
FACE = {"__init__", "__main__"}


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and the part of the package of each import, wherever it stands."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "plantune":
            names = [f"plantune.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            package, _, rest = name.partition(".")
            part = rest.partition(".")[0]
            if package == "plantune" and part in LEVEL:
                yield node.lineno, part


def upwards(text: str, part: str) -> list[str]:
    """The imports of a part's file that go against the order."""
    return [
        f"line {line}: {part} imports {other}"
        for line, other in imported(ast.parse(text))
        if other != part and LEVEL[other] >= LEVEL[part]
    ]


def test_every_part_of_the_package_has_its_place() -> None:
    parts = {part_of(path) for path in ROOT.rglob("*.py")}
    assert parts - FACE == set(LEVEL)


@pytest.mark.parametrize("part", sorted(LEVEL))
def test_it_imports_only_what_stands_before_it(part: str) -> None:
    paths = [path for path in sorted(ROOT.rglob("*.py")) if part_of(path) == part]
    assert paths
    found = {str(path.relative_to(ROOT)): upwards(path.read_text("utf-8"), part) for path in paths}
    assert {path: faults for path, faults in found.items() if faults} == {}


@pytest.mark.parametrize(
    "text",
    [
        "from plantune.runtime.program import Program",
        "import plantune.measure",
        "from plantune import plan_db",
        "def f():\n    from plantune.search.search import Search",
        "if TYPE_CHECKING:\n    from plantune.plan import Plan",
    ],
)
def test_an_import_upwards_is_found(text: str) -> None:
    assert len(upwards(text, "graph")) == 1
    assert upwards("from plantune.errors import InvalidGraph", "graph") == []
