"""How a shared search scales: recorded outcomes replayed by 1 to 1,024 workers on hosts of eight.

    python tools/studies/scale [--url URL] [--real 1 2 4 8 16 32] [--json FILE] [--plot FILE.png]
    python tools/studies/scale --costs FILE      # compute anew from what FILE measured, no database

With a URL of PostgreSQL it measures what operations take there and runs real searches, whose
workers sleep as long as was recorded. What more workers do is computed event by event from these
costs.
"""

from __future__ import annotations

import argparse
import json
import platform
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import optuna
import sqlalchemy
from real import costs_of, run
from replay import Recording
from simulate import FREE, Costs, simulate

from plantune.devices.host import cpu_name
from plantune.report.tables import table
from plantune.search.shared.rdb import with_driver

WORKERS = tuple(1 << power for power in range(11))
SEATS = 8
# All that is measured of se_resnet9 on an H200 has this many candidates; larger problems take
# longer for each: as training on 2,048 images, and a search on a CPU.
CANDIDATES = 18_435
# So many times as many are computed for the most workers.
MORE = (4, 8)
SLOWER = {"as recorded": 1.0, "20 times": 20.0}
ROWS = 300
REAL_S = 6.0


def computed(costs: Costs, count: int, workers: Sequence[int]) -> list[dict[str, Any]]:
    rows = []
    for name, slower in SLOWER.items():
        jobs = Recording(count, slower).jobs()
        longest_s = max(job.busy_s for job in jobs)
        for number in workers:
            found = simulate(jobs, number, costs, SEATS)
            ideal = simulate(jobs, number, FREE, SEATS)
            row = {"times": name, "workers": number, "candidates": count, **asdict(found)}
            row |= {"longest_s": longest_s, "without_database": ideal.efficiency}
            rows.append(row)
    return rows


def measured(url: str, workers: list[int], costs: Costs) -> list[dict[str, Any]]:
    """Real searches of about as long, with the candidates that they have time for."""
    rows = []
    for name, slower in SLOWER.items():
        for count in workers:
            one = Recording(200, slower).jobs()
            seconds = sum(job.busy_s for job in one) / len(one)
            jobs = Recording(max(int(REAL_S * count / seconds), 2 * count), slower).jobs()
            ran = run(url, f"scale {secrets.token_hex(4)}", jobs, count, SEATS)
            assert ran.outcomes == len(jobs), "each candidate counts once"
            same = simulate(jobs, count, costs, SEATS)
            row = {"times": name, "workers": count, "candidates": len(jobs), **asdict(ran)}
            rows.append({**row, "computed": same.efficiency})
            print(f"{name}, {count} workers: {ran}, computed {same.efficiency:.2f}", flush=True)
    return rows


def show(document: dict[str, Any]) -> str:
    """The table of both."""
    real = {(row["times"], row["workers"]): row for row in document["measured"]}
    rows = []
    for row in document["computed"]:
        other = real.get((row["times"], row["workers"]))
        rows.append(
            [
                row["times"],
                str(row["workers"]),
                "-" if other is None else f"{other['efficiency']:.2f}",
                f"{row['efficiency']:.2f}",
                f"{row['without_database']:.2f}",
                f"{row['seconds']:.0f}",
                f"{row['best_s']:.0f}",
                f"{row['claims_per_s']:.0f}",
                f"{row['locked']:.2f}",
            ]
        )
    titles = ["times", "workers", "efficiency measured", "computed", "without database"]
    titles += ["seconds", "until the best", "claims a second", "study locked"]
    return table(titles, rows, "lrrrrrrrr", None)


def plot(document: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name in SLOWER:
        rows = [row for row in document["computed"] if row["times"] == name]
        (line,) = axes.plot(
            [r["workers"] for r in rows], [r["efficiency"] for r in rows], label=f"{name}, computed"
        )
        real = [row for row in document["measured"] if row["times"] == name]
        axes.plot(
            [r["workers"] for r in real],
            [r["efficiency"] for r in real],
            "o",
            color=line.get_color(),
            label=f"{name}, measured",
        )
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("workers, eight a host")
    axes.set_ylabel("part of their time in which they measure")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", help="of a PostgreSQL, in which studies are left")
    parser.add_argument("--server", type=int, help="its process, to count CPU seconds")
    parser.add_argument("--costs", type=Path, help="a file that --json wrote")
    parser.add_argument("--real", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    if (given.url is None) == (given.costs is None):
        parser.error("give --url or --costs")
    if given.costs is not None:
        document = json.loads(given.costs.read_text())
        costs = Costs(**document["costs"])
    else:
        url = with_driver(given.url)
        costs = costs_of(url, f"costs {secrets.token_hex(4)}", given.rows, given.server)
        print(f"seconds: {costs}", flush=True)
        libraries = {"optuna": optuna.__version__, "sqlalchemy": sqlalchemy.__version__}
        document = {
            "machine": f"{cpu_name()}, Python {platform.python_version()}",
            "libraries": libraries,
            "costs": asdict(costs),
            "rows": given.rows,
            "seconds": "of the clock" if given.server is None else "of CPUs, client and server",
            "measured": measured(url, given.real, costs),
        }
    document["computed"] = computed(costs, CANDIDATES, WORKERS)
    document["more_candidates"] = [
        row for many in MORE for row in computed(costs, many * CANDIDATES, WORKERS[-1:])
    ]
    print(show(document))
    for row in document["more_candidates"]:
        text = "{times}, {candidates:,} candidates, {workers:,} workers: {efficiency:.2f}"
        print(text.format(**row), f"({row['without_database']:.2f} without database)")
    if given.json is not None:
        given.json.write_text(json.dumps(document, indent=1) + "\n")
    if given.plot is not None:
        plot(document, given.plot)


if __name__ == "__main__":
    main()
