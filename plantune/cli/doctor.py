"""`plantune doctor`: what this machine can do, what is missing, how to get it."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import click

from plantune.cli.checks import LIMITED, MISSING, OK, Check, checks
from plantune.cli.console import Console
from plantune.cli.cuda_checks import cuda_checks
from plantune.cli.exit_codes import FAILED
from plantune.cli.hints import Choice
from plantune.cli.lookup import require_device
from plantune.cli.options import common_options, example
from plantune.space.arch import ARCH_NAMES

COLORS = {OK: "green", LIMITED: "yellow", MISSING: "red"}
WIDTH = max(map(len, COLORS))


@click.command("doctor", epilog=example("plantune doctor", "plantune doctor --arch sm90"))
@common_options()
@click.option(
    "--arch",
    type=Choice(ARCH_NAMES),
    default="cpu",
    help="Exit 6 if plans for it cannot be measured here.",
)
def doctor_command(console: Console, place: Path | None, arch: str) -> None:
    """Shows what this machine can do, and how to get what is missing.

    Exit 0 if plantune can run here; what is limited only costs kernel families or comfort.
    """
    found = []
    for check in chain(checks(place), cuda_checks(arch)):
        _say(console, check)
        found.append(check)
    can_run = not any(check.required and check.status == MISSING for check in found)
    console.say()
    console.say("plantune can run here" if can_run else "plantune cannot run here")
    if can_run:
        require_device(arch, "measure")
    console.emit({"can_run": can_run, "checks": [vars(check) for check in found]})
    if not can_run:
        raise click.exceptions.Exit(FAILED)


def _say(console: Console, check: Check) -> None:
    status = click.style(check.status.ljust(WIDTH), fg=COLORS[check.status])
    console.say(f"{status}  {check.name}: {check.detail}")
    if check.how:
        console.say(f"{' ' * WIDTH}    {check.how}")
