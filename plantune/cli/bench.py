"""`plantune bench`: a stored plan against the framework's ways, interleaved in one run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from plantune.cli.console import Console, bold, note, require_replaceable_json, write_json
from plantune.cli.lookup import (
    Chosen,
    chosen_plan,
    environment_here,
    require_device,
    worker_for,
)
from plantune.cli.options import (
    FILE,
    Key,
    Seconds,
    bundled,
    common_options,
    example,
    key_options,
)
from plantune.report.bench import bench_document, bench_table, verdict
from plantune.report.plot import (
    FORMATS,
    HOW_TO_GET,
    bar_plot,
    can_plot,
    require_replaceable_plot,
)
from plantune.rivals import runner_text

if TYPE_CHECKING:
    from plantune.measure.race import Race


SLOW_PEER = "compile-max-autotune"
# It takes 87 s for a small network on an H200 with 16 cores (2026-11-20).
PEER_BUILD_S = 900.0


@dataclass(frozen=True)
class Wanted:
    """Which peers to run, how long, and which files to write."""

    peers: str | None
    budget: float
    seed: int
    plot: Path | None
    output: Path | None


@click.command(
    "bench",
    epilog=example(
        "plantune bench --batch 8 --plot bench.png",
        "plantune bench --batch 8 --peers eager,torchscript --json",
    ),
)
@common_options(json_file=True)
@key_options
@click.option("--peers", metavar="A,B", help="Only these baselines; all of them by default.")
@click.option(
    "--budget",
    type=Seconds(),
    default=10.0,
    show_default=True,
    help="Seconds for timing; building comes on top.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, (1 << 31) - 2),
    default=0,
    show_default=True,
    help="Of weights and images.",
)
@click.option("--plot", type=FILE, metavar="FILE.png", help="Draw a bar plot (needs matplotlib).")
@click.option("--output", type=FILE, metavar="FILE", help="Write the JSON object to FILE, too.")
@bundled(Wanted, "wanted")
def bench_command(console: Console, place: Path | None, key: Key, wanted: Wanted) -> None:
    """Times a stored plan against the framework's best ways.

    All ways run interleaved in one process, on the same random weights and images.
    """
    require_device(key.arch, "measure")
    _require_plot(wanted.plot)
    for path in (wanted.output, console.json_file):
        if path is not None:
            require_replaceable_json(path)
    peers = _peers(wanted.peers, key.arch)
    chosen = chosen_plan(place, key)
    if SLOW_PEER in peers:
        note(f"{SLOW_PEER} compiles for a minute or two; --peers leaves it out")
    race = _race(chosen, peers, wanted)
    document = bench_document(race, environment_here(key.arch), key.to_json())
    _show(console, chosen, key, race, document)
    if wanted.output is not None:
        write_json(wanted.output, document)
    if wanted.plot is not None:
        bar_plot(document, wanted.plot)
        console.say(f"plot: {wanted.plot}")
    console.emit(document)


def _require_plot(path: Path | None) -> None:
    """Before anything is timed, what would fail at the end."""
    if path is None:
        return
    if path.suffix.lower() not in FORMATS:
        raise click.BadParameter(
            f"{path}: give a name that ends in {' or '.join(FORMATS)}", param_hint="'--plot'"
        )
    if not path.absolute().parent.is_dir():
        raise click.BadParameter(f"{path}: its folder is not there", param_hint="'--plot'")
    if not can_plot():
        raise click.UsageError(f"--plot needs matplotlib, which is not installed: {HOW_TO_GET}")
    require_replaceable_plot(path)


def _peers(text: str | None, arch: str) -> tuple[str, ...]:
    from plantune.measure.race import baselines_for

    known = baselines_for(arch)
    if text is None:
        return known
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        what = f"no baseline is called {', '.join(unknown)}" if unknown else "names no baseline"
        raise click.BadParameter(
            f"{what}; known on {arch}: {', '.join(known)}", param_hint="'--peers'"
        )
    return names


def _race(chosen: Chosen, peers: tuple[str, ...], wanted: Wanted) -> Race:
    from plantune.measure.timing import Effort

    effort = Effort(budget_s=wanted.budget)
    with worker_for(chosen.plan.arch, PEER_BUILD_S) as worker:
        return worker.race(chosen.problem, chosen.plan, peers, effort, wanted.seed)


def _show(console: Console, chosen: Chosen, key: Key, race: Race, document: dict[str, Any]) -> None:
    runner = runner_text(chosen.plan.runner)
    console.say(f"{key}, {chosen.label} ({chosen.match} match)")
    if runner is not None:
        console.say(runner)
    console.say(bench_table(document, console.width))
    for name, reason in race.failures.items():
        console.say(f"{name} did not run: {reason}")
    console.say(bold(verdict(race)))
