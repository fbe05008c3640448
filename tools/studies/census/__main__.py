#!/usr/bin/env python3
"""How much of torchvision's and timm's networks plantune takes, how right it is, and how fast.

    pip install -e '.[census]'
    python tools/studies/census --rows census.jsonl  # this machine: taken, then right
    python tools/studies/census --rows census.jsonl --table docs/census.md --measure none
    python tools/studies/census --rows gpu.jsonl --sample 60 --device cuda --measure time \
        --mode infer --jobs 6 --memory 1000 --cache cache --limit 600 \
        --rivals eager-channels-last cuda-graph

Networks with the plan of a search, beside compiled rivals: `tools/studies/census/one_call.py`.

Each network and mode is a line in the file of rows, written as soon as it is known: a census that
was stopped goes on where it was. Networks of 30 million parameters and more are left out. Several
jobs prepare networks beside each other, and take turns on a GPU.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import networks
from asked import Asked
from children import Child, Limits, Todo
from measures import MEASURES
from rows import Rows
from table import write_table
from timing import Race

MODES = ("infer", "train")


def main() -> None:
    given = _arguments()
    rows = Rows(given.rows)
    rows.forget(given.forget)
    sizes = Child(Limits(given.network_limit, given.memory))
    todo = Todo(_todo(given, rows, sizes), time.monotonic() + given.limit)
    threads = [threading.Thread(target=_work, args=(given, rows, todo)) for _ in range(given.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sizes.stop()
    if given.table:
        write_table(rows.by_key.values(), given.table)


def _work(given: argparse.Namespace, rows: Rows, todo: Todo) -> None:
    """One job: a process of its own measures."""
    asked = Asked("", given.image_size, given.batch, given.arch, given.device)
    race = Race(given.rivals, given.race_seconds)
    asked = replace(asked, race=race)
    child = Child(Limits(given.network_limit, given.memory, given.cache))
    try:
        while (found := todo.take()) is not None:
            name, mode, measure = found
            _measure(rows, child, name, measure, replace(asked, mode=mode))
    finally:
        child.stop()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    say = parser.add_argument
    say("--rows", type=Path, required=True, help="the file of rows; it is made, or continued")
    say("--measure", nargs="+", default=["taken", "right"], choices=[*MEASURES, "none"])
    say("--mode", nargs="+", default=MODES, choices=MODES)
    say("--sample", type=int, metavar="N", help="the first N of sample.txt, not all networks")
    say("--networks", nargs="+", metavar="NAME", help="some networks, as timm/resnet18")
    say("--collection", choices=("torchvision", "timm"), help="of one collection only")
    say("--image-size", type=int, default=64, help="of `right`, where a network allows it")
    say("--batch", type=int, default=2)
    say("--arch", default="sm90", help="whose kernels count for `share`")
    say("--device", default="cpu", choices=("cpu", "cuda"), help="of what runs the networks")
    say("--limit", type=float, default=float("inf"), metavar="SECONDS", help="of this run")
    say("--network-limit", type=float, default=120.0, metavar="SECONDS", help="of each row")
    say("--memory", type=float, default=8.0, metavar="GIB", help="of the process that measures")
    say("--jobs", type=int, default=1, help="networks that are prepared beside each other")
    say("--cache", metavar="FOLDER", help="of compiled kernels, kept for the next run")
    say("--rivals", nargs="+", metavar="ROUTE", help="of `time`, not all of the framework's")
    say("--race-seconds", type=float, default=3.0, metavar="SECONDS", help="of each race of `time`")
    say("--forget", nargs="+", default=(), metavar="VERDICT", help="these rows, such as refused")
    say("--table", type=Path, help="write the table of all rows here, as Markdown")
    return parser.parse_args()


def _todo(given: argparse.Namespace, rows: Rows, child: Child) -> Iterator[tuple[str, str, str]]:
    """What is not known yet, one measure and mode after the other."""
    if "none" in given.measure:
        return
    names = networks.in_turns(_names(given), lambda name: _parameters(name, rows) or 0)
    for measure in given.measure:
        for mode in given.mode:
            for name in names:
                if (name, mode, measure) not in rows.by_key and _is_small(name, rows, child):
                    yield name, mode, measure


def _names(given: argparse.Namespace) -> list[str]:
    names = given.networks or (
        networks.all_names() if given.sample is None else networks.sample(given.sample)
    )
    return [name for name in names if name.startswith(given.collection or "")]


def _parameters(name: str, rows: Rows) -> int | None:
    return rows.by_key.get((name, "", "size"), {}).get("parameters")


def _is_small(name: str, rows: Rows, child: Child) -> bool:
    if (name, "", "size") not in rows.by_key:
        _measure(rows, child, name, "size", Asked(mode=""))
    parameters = _parameters(name, rows)
    return parameters is not None and parameters < networks.MOST_PARAMETERS


def _measure(rows: Rows, child: Child, name: str, measure: str, asked: Asked) -> None:
    row = child.row(name, MEASURES[measure], asked)
    rows.add({"network": name, "mode": asked.mode, "measure": measure, **row})
    print(name, asked.mode, measure, row["verdict"], row.get("reason", ""), flush=True)


if __name__ == "__main__":
    main()
