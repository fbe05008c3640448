#!/usr/bin/env python3
"""How much of torchvision's and timm's networks plantune takes, how right it is, and how fast.

    pip install -e '.[census]'
    python tools/census --rows census.jsonl                      # this machine: taken, then right
    python tools/census --rows census.jsonl --table docs/census.md --measure none
    python tools/census --rows gpu.jsonl --sample 60 --device cuda --measure called time --limit 600

Each network and mode is a line in the file of rows, written as soon as it is known: a census that
was stopped goes on where it was. Networks of 30 million parameters and more are left out.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import networks
from children import Child, Limits
from measures import MEASURES, Asked
from rows import Rows
from table import write_table

MODES = ("infer", "train")


def main() -> None:
    given = _arguments()
    rows = Rows(given.rows)
    asked = Asked("", given.image_size, given.batch, given.arch, given.device)
    rows.forget(given.forget)
    child = Child(Limits(given.network_limit, given.memory))
    until = time.monotonic() + given.limit
    try:
        for name, mode, measure in _todo(given, rows, child):
            if time.monotonic() > until:
                print("time is up: the same command goes on")
                break
            _measure(rows, child, name, measure, Asked(**{**vars(asked), "mode": mode}))
    finally:
        child.stop()
    if given.table:
        write_table(rows.by_key.values(), given.table)


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
    say("--forget", nargs="+", default=(), metavar="VERDICT", help="these rows, such as refused")
    say("--table", type=Path, help="write the table of all rows here, as Markdown")
    return parser.parse_args()


def _todo(given: argparse.Namespace, rows: Rows, child: Child):  # type: ignore[no-untyped-def]
    """What is not known yet, one measure and mode after the other."""
    names = networks.in_turns(_names(given), lambda name: _parameters(name, rows) or 0)
    for measure in given.measure:
        if measure == "none":
            return
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
