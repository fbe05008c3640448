#!/usr/bin/env python3
"""Each network with the plan of a search, beside compiled rivals, in one go of some minutes.

    python tools/census/one_call.py torchvision/resnet50 policies/nature \
        --rows tuned.jsonl --cache cache --device cuda --budget 120 --limit 170

While one process searches, another on half of the cores compiles the rivals. What both time on the
GPU takes turns, so neither disturbs the other's choices. Then all race, the GPU is theirs alone.
What is done by then is a line in the file of rows, and the same command goes on: a rival that was
not compiled within the time is left out, and what was compiled of it is kept in the cache.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import beside
import speed
from asked import Asked, Row
from children import Child, Limits, Measure
from rows import Rows
from timing import Race

# What the start of a process and the race take of a network's time.
RACE_S = 20.0
# By what they keep, the variables that name its folder.
CACHES = {"inductor": "TORCHINDUCTOR_CACHE_DIR", "triton": "TRITON_CACHE_DIR"}


@dataclass(frozen=True)
class Kept:
    """What is known of one network, and how to ask for more."""

    name: str
    rows: Rows
    asked: Asked

    def ask(self, child: Child, measure: Measure, named: str, seconds: float) -> Row:
        """The row of a measure, written as soon as it is known."""
        child.limits = replace(child.limits, seconds=max(seconds, 1.0))
        row = child.row(self.name, measure, self.asked)
        self.rows.add({"network": self.name, "mode": self.asked.mode, "measure": named, **row})
        print(self.name, named, {key: row.get(key) for key in SHOWN if key in row}, flush=True)
        return row

    def has(self, named: str, verdict: str) -> bool:
        row = self.rows.by_key.get((self.name, self.asked.mode, named), {})
        return row.get("verdict") == verdict


SHOWN = (
    "verdict",
    "reason",
    "seconds",
    "compile_s",
    "failures",
    "search_s",
    "ms",
    "ratios",
    "distances",
)


def main() -> None:
    given = _arguments()
    given.cache.mkdir(parents=True, exist_ok=True)
    for folder, variable in CACHES.items():
        os.environ[variable] = str((given.cache / folder).resolve())
    os.environ["PLANTUNE_TURNS"] = str((given.cache / "turns").resolve())
    rows = Rows(given.rows)
    for name in given.networks:
        kept = Kept(name, rows, _asked(given))
        if not kept.has("tuned", "timed"):
            _one(kept, given)


def _one(kept: Kept, given: argparse.Namespace) -> None:
    until = time.monotonic() + given.limit
    limits = Limits(given.limit, given.memory, str(given.cache.resolve()))
    search, rivals = Child(limits), Child(limits)
    both = given.limit - RACE_S
    try:
        with ThreadPoolExecutor(2) as pool:
            compiling = pool.submit(kept.ask, rivals, beside.compile_rivals, "compiled", both)
            if not kept.has("searched", "searched"):
                kept.ask(search, speed.searched, "searched", both)
            search.stop()
            compiling.result()
        kept.ask(rivals, beside.race, "tuned", until - time.monotonic())
        if kept.has("tuned", "timed"):
            kept.ask(rivals, beside.errors, "errors", until - time.monotonic())
    finally:
        search.stop()
        rivals.stop()


def _asked(given: argparse.Namespace) -> Asked:
    race = Race(given.rivals, given.race_seconds)
    asked = Asked(given.mode, device=given.device, race=race, budget_s=given.budget)
    until = time.monotonic() + given.limit - 1.2 * RACE_S
    return replace(asked, compile_until=until)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    say: Any = parser.add_argument
    say("networks", nargs="+", metavar="NAME", help="as torchvision/resnet18 or policies/nature")
    say("--rows", type=Path, required=True, help="the file of rows; it is made, or continued")
    say("--cache", type=Path, required=True, help="of kernels, plans and what rivals compile")
    say("--mode", default="infer", choices=("infer", "train"))
    say("--device", default="cuda", choices=("cpu", "cuda"))
    say("--budget", type=float, default=120.0, metavar="SECONDS", help="of each search")
    say("--limit", type=float, default=170.0, metavar="SECONDS", help="of each network, all in")
    say("--memory", type=float, default=1000.0, metavar="GIB", help="of each process")
    say("--rivals", nargs="+", metavar="WAY", default=beside.RIVALS)
    say("--race-seconds", type=float, default=3.0, metavar="SECONDS", help="of each of two races")
    return parser.parse_args()


if __name__ == "__main__":
    main()
