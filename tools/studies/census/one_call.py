#!/usr/bin/env python3
"""Networks with the plans of searches, beside compiled rivals, in one go of some minutes.

    python tools/studies/census/one_call.py torchvision/resnet50 policies/nature=25 \
        --rows tuned.jsonl --cache cache --device cuda --budget 120 --limit 170

A network may have a budget of its own, in seconds after its name. While one is searched, another
process compiles the rivals of the next ones. What both time on the GPU takes turns, so neither
disturbs the other's choices; so does each race, as soon as a network's plan and rivals are there.
What is done by then is a line in the file of rows, and the same command goes on: a rival that was
not compiled within its time is left out, and what was compiled of it is kept in the cache. Those of
`--late` join a second race of the networks that `--late-networks` names.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import beside
from asked import Asked
from children import Child, Limits
from lanes import Lanes, Line, Routes
from rows import Rows
from timing import RIVALS, Race

from plantune.measure.racing.routes import ROUTES

# By what they keep, the variables that name its folder.
CACHES = {"inductor": "TORCHINDUCTOR_CACHE_DIR", "triton": "TRITON_CACHE_DIR"}


def main() -> None:
    given = _arguments()
    until = time.monotonic() + given.limit
    given.cache.mkdir(parents=True, exist_ok=True)
    for folder, variable in CACHES.items():
        os.environ[variable] = str((given.cache / folder).resolve())
    os.environ["PLANTUNE_TURNS"] = str((given.cache / "turns").resolve())
    limits = Limits(given.limit, given.memory, str(given.cache.resolve()))
    rows = Rows(given.rows)
    lines = [_line(name, rows, given, limits) for name in given.networks]
    todo = [line for line in lines if not line.has("tuned", "timed")]
    Lanes(todo, _routes(given), limits, until, given.compile_seconds).run()


def _line(given_name: str, rows: Rows, given: argparse.Namespace, limits: Limits) -> Line:
    name, _, seconds = given_name.partition("=")
    budget_s = float(seconds) if seconds else given.budget
    race = Race(given.rivals, given.race_seconds)
    asked = Asked(given.mode, device=given.device, race=race, budget_s=budget_s)
    line = Line(name, asked, rows, Child(limits))
    line.searched = line.has("searched", "searched")
    return line


def _routes(given: argparse.Namespace) -> Routes:
    captured = [name for name in given.rivals if ROUTES[given.device][name].captured]
    first = [name for name in given.rivals if name not in captured]
    return Routes(first, captured, given.late, given.late_networks, given.compilers)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    say: Any = parser.add_argument
    say("networks", nargs="+", metavar="NAME[=SECONDS]", help="as torchvision/resnet18")
    say("--rows", type=Path, required=True, help="the file of rows; it is made, or continued")
    say("--cache", type=Path, required=True, help="of kernels, plans and what rivals compile")
    say("--mode", default="infer", choices=("infer", "train"))
    say("--device", default="cuda", choices=("cpu", "cuda"))
    say("--budget", type=float, default=120.0, metavar="SECONDS", help="of each search")
    say("--limit", type=float, default=170.0, metavar="SECONDS", help="of all networks together")
    say("--memory", type=float, default=1000.0, metavar="GIB", help="of each process")
    say("--rivals", nargs="+", metavar="ROUTE")
    say("--late", nargs="+", metavar="ROUTE", default=beside.LATE)
    say("--late-networks", nargs="+", metavar="NAME", default=())
    say("--compilers", type=int, default=1, help="networks whose rivals compile side by side")
    say("--compile-seconds", type=float, default=110.0, metavar="SECONDS", help="of one rival")
    say("--race-seconds", type=float, default=3.0, metavar="SECONDS", help="of each of two races")
    given = parser.parse_args()
    given.rivals = given.rivals or (beside.RIVALS if given.device == "cuda" else RIVALS["cpu"])
    late = given.late if given.late_networks else ()
    if unknown := [name for name in (*given.rivals, *late) if name not in ROUTES[given.device]]:
        parser.error(f"no routes on {given.device}: {', '.join(unknown)}")
    return given


if __name__ == "__main__":
    main()
