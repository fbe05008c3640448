"""The folders of the package have an order: each imports only from those before it. So have the
rooms inside a folder, where they have one.

An import inside a function counts, and so does one for type checkers alone: who names a type of a
later folder knows that folder.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import plantune

ROOT = Path(plantune.__file__).parent
# Those of one line know nothing of each other.
ORDER = (
    "errors",
    "base",
    "graph",
    "layers space",
    "devices models",
    "kernels",
    "plans",
    "runtime",
    "training",
    "measure",
    "search",
    "report",
    "tuning",
    "backend cli",
)
# A dot stands for the files that lie in the folder itself. Rooms of one line may know each other.
INSIDE = {
    "devices": ("cuda", "."),
    "graph": ("operators", ". ops", "passes spelling", "tracing"),
    "kernels": (". cuda patterns weights", "cpu cutlass hopper recurrent", "families"),
    "measure": (".", "racing", "worker"),
    "plans": (". planner", "database"),
    "runtime": ("watched", "program", "captured", "proof", "calls", "."),
}
# The registry walks the folder of families; it names none of them.
DISCOVERS = {("kernels/registry.py", "families")}
LEVEL = {part: level for level, line in enumerate(ORDER) for part in line.split()}
# The names that users import, and `python -m plantune`.
FACE = {"__init__", "__main__"}
MOST_FILES = 30
FAMILIES = ["families"]


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imported(tree: ast.Module) -> Iterator[tuple[int, list[str]]]:
    """The line of each import from the package, wherever it stands, and the names in its path."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            package, *rest = name.split(".")
            if package == "plantune" and rest and rest[0] in LEVEL:
                yield node.lineno, rest


def upwards(text: str, part: str) -> list[str]:
    """The imports of a part's file that go against the order."""
    return [
        f"line {line}: {part} imports {other}"
        for line, (other, *_) in imported(ast.parse(text))
        if other != part and LEVEL[other] >= LEVEL[part]
    ]


def room_in(folder: str, names: list[str]) -> str:
    """The room of a module or name below that folder."""
    return names[0] if names and (ROOT / folder / names[0]).is_dir() else "."


def upwards_inside(text: str, folder: str, room: str) -> list[str]:
    """The imports of a room's file that go against the order inside of its folder."""
    level = levels_of(INSIDE[folder])
    found = []
    for line, (part, *rest) in imported(ast.parse(text)):
        other = room_in(folder, rest)
        if part == folder and other != room and level[other] > level[room]:
            found.append(f"line {line}: {folder}/{room} imports {other}")
    return found


def levels_of(order: tuple[str, ...]) -> Mapping[str, int]:
    return {room: level for level, line in enumerate(order) for room in line.split()}


def test_every_part_of_the_package_has_its_place() -> None:
    parts = {part_of(path) for path in ROOT.rglob("*.py")}
    assert parts - FACE == set(LEVEL)


@pytest.mark.parametrize("part", sorted(LEVEL))
def test_it_imports_only_what_stands_before_it(part: str) -> None:
    paths = [path for path in sorted(ROOT.rglob("*.py")) if part_of(path) == part]
    assert paths
    found = {str(path.relative_to(ROOT)): upwards(path.read_text("utf-8"), part) for path in paths}
    assert {path: faults for path, faults in found.items() if faults} == {}


@pytest.mark.parametrize("folder", sorted(INSIDE))
def test_rooms_inside_have_their_order(folder: str) -> None:
    found: dict[str, list[str]] = {}
    rooms = set()
    for path in sorted((ROOT / folder).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        room = room_in(folder, list(path.relative_to(ROOT / folder).parts))
        rooms.add(room)
        faults = upwards_inside(path.read_text("utf-8"), folder, room)
        known = [other for place, other in DISCOVERS if place == name]
        found[name] = [fault for fault in faults if not fault.endswith(tuple(known or ("\n",)))]
    assert rooms == set(levels_of(INSIDE[folder]))
    assert {path: faults for path, faults in found.items() if faults} == {}


@pytest.mark.parametrize(
    "text",
    [
        "from plantune.runtime.program.program import Program",
        "import plantune.measure",
        "from plantune import plans",
        "def f():\n    from plantune.search.search import Search",
        "if TYPE_CHECKING:\n    from plantune.plans.plan import Plan",
    ],
)
def test_an_import_upwards_is_found(text: str) -> None:
    assert len(upwards(text, "graph")) == 1
    assert upwards("from plantune.errors import InvalidGraph", "graph") == []


def test_an_import_upwards_inside_is_found() -> None:
    text = (
        "from plantune.runtime.calls import load\nfrom plantune.runtime.module import TunedModule"
    )
    assert len(upwards_inside(text, "runtime", "program")) == 2
    assert (
        upwards_inside(
            "from plantune.runtime.watched import module_signature", "runtime", "program"
        )
        == []
    )


def families_named_in(text: str) -> list[str]:
    """The kernel families that a file imports."""
    return [".".join(names[2:]) for _, names in imported(ast.parse(text)) if names[1:2] == FAMILIES]


def test_a_family_imports_no_other() -> None:
    """What families share stands in the rooms before theirs."""
    paths = sorted((ROOT / "kernels" / "families").rglob("*.py"))
    found = {path.name: families_named_in(path.read_text("utf-8")) for path in paths}
    assert {name: others for name, others in found.items() if others} == {}
    assert families_named_in("from plantune.kernels.families.pool import Pool") == ["pool.Pool"]
    assert families_named_in("from plantune.kernels.families import pool") == ["pool"]


@pytest.mark.parametrize("top", ["plantune", "tests"])
def test_no_folder_is_too_full(top: str) -> None:
    """But `families`, which has a file for each family."""
    files = [path for path in (ROOT.parent / top).rglob("*.py") if path.parent.name != "families"]
    count = dict.fromkeys({path.parent for path in files}, 0)
    for path in files:
        count[path.parent] += 1
    full = {str(folder): number for folder, number in count.items() if number > MOST_FILES}
    assert full == {}
