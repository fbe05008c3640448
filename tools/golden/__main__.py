"""What must stay equal while files move: written into a folder, and compared with another one.

    python tools/golden write before      # under 4 minutes on two cores
    python tools/golden compare before after

Digests of graphs and steps, plans where nothing was measured, rendered kernels, shipped plans and
what the command line says; times of imports stand beside each other and are not compared. Both
folders are of one machine: a compiler, torch and its settings decide which kernels there are.
Without `--only` all parts are written; `compare` exits 1 where one differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

MOST_SHOWN = 40
TIMES = "times"
# What two processes write beside each other; sources are those of the plans.
SIDE_BY_SIDE = (("plans", "sources"), ("spaces", "graphs", "shipped", "commands"))


def write(folder: Path, only: list[str]) -> None:
    """All parts by two processes at once, or only some by this one; then the times, alone."""
    folder.mkdir(parents=True, exist_ok=True)
    if only:
        _write_parts(folder, only)
        return
    own = [sys.executable, str(Path(__file__).parent), "write", str(folder), "--only"]
    children = [subprocess.Popen([*own, *names]) for names in SIDE_BY_SIDE]
    codes = [child.wait() for child in children]
    if any(codes):
        sys.exit("a part could not be written")
    _write_parts(folder, [TIMES])


def _write_parts(folder: Path, only: list[str]) -> None:
    from commands import commands, times
    from parts import PARTS

    parts = {**PARTS, "commands": commands}
    for name, part in parts.items():
        if name not in only:
            continue
        began = time.monotonic()
        content = dict(part())
        _write(folder / f"{name}.json", content)
        print(f"{name}: {len(content)} entries, {time.monotonic() - began:.0f} s", flush=True)
    if TIMES in only:
        _write(folder / f"{TIMES}.json", times())


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", "utf-8")


def compare(before: Path, after: Path) -> int:
    """Prints what differs; how many parts do."""
    names = sorted({path.name for folder in (before, after) for path in folder.glob("*.json")})
    differing = 0
    for name in names:
        one, other = (_read(folder / name) for folder in (before, after))
        if name == f"{TIMES}.json":
            print(f"{name}, in seconds: {json.dumps(one)} before, {json.dumps(other)} after")
            continue
        lines = differences(one, other)
        differing += bool(lines)
        print(f"{name}: {f'{len(lines)} differences' if lines else 'equal'}")
        for line in lines[:MOST_SHOWN]:
            print(f"  {line}")
        if len(lines) > MOST_SHOWN:
            print(f"  and {len(lines) - MOST_SHOWN} more")
    return differing


def _read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8")) if path.is_file() else None


def differences(one: Any, other: Any, place: str = "") -> list[str]:
    """Each place where two values differ, with both."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = {**one, **other}
        return [
            line
            for key in keys
            for line in differences(
                one.get(key), other.get(key), f"{place} / {key}" if place else key
            )
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [line for at, (a, b) in pairs for line in differences(a, b, f"{place}[{at}]")]
    return [] if one == other else [f"{place}: {_short(one)} -> {_short(other)}"]


def _short(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write", help="write the golden files of this checkout")
    writing.add_argument("folder", type=Path)
    writing.add_argument("--only", nargs="+", default=[], metavar="PART", help="graphs, plans, ...")
    comparing = commands.add_parser("compare", help="show what differs between two folders")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    given = parser.parse_args()
    if given.command == "write":
        write(given.folder, given.only)
    else:
        sys.exit(min(compare(given.before, given.after), 1))


if __name__ == "__main__":
    main()
