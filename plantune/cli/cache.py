"""`plantune cache`: the compiled kernels in the cache folder - show, clear."""

from __future__ import annotations

import re
from pathlib import Path

import click

from plantune.base.paths import cache_folder, can_write, database_path
from plantune.cli.console import Console
from plantune.cli.hints import Commands
from plantune.cli.options import common_options, example
from plantune.errors import PlantuneError
from plantune.report.tables import bytes_text, counted

# Libraries for the CPU, and binaries for GPUs of all archs.
PLACES = {"cpu": re.compile(r"[0-9a-f]{64}\.so"), "cuda": re.compile(r"[0-9a-f]{64}\.bin")}


@click.group("cache", cls=Commands, epilog=example("plantune cache show"))
def cache_command() -> None:
    """Shows or clears the compiled kernels.

    Plans and trials are not touched.
    """


@cache_command.command("show", epilog=example("plantune cache show --json"))
@common_options()
def show_command(console: Console, place: Path | None) -> None:
    """Shows what is in the cache folder: kernels by arch, and the plan database."""
    folder, database = cache_folder(), place or database_path()
    found = {place: _kernels(folder, place) for place in PLACES}
    kernels = {arch: files for arch, files in found.items() if files}
    sizes = {arch: sum(map(_size, files)) for arch, files in kernels.items()}
    rows = [[arch, str(len(kernels[arch])), bytes_text(sizes[arch])] for arch in kernels]
    console.say(f"cache folder: {folder}")
    if rows:
        console.table(["arch", "kernels", "size"], rows, "lrr")
    else:
        console.say("no kernels")
    here = bytes_text(_size(database)) if database.exists() else "not there yet"
    console.say(f"plan database: {database} ({here})")
    console.emit(
        {
            "folder": str(folder),
            "kernels": {a: {"files": len(kernels[a]), "bytes": sizes[a]} for a in kernels},
            "database": {"path": str(database), "bytes": _size(database)},
        }
    )


@cache_command.command("clear", epilog=example("plantune cache clear"))
@common_options()
def clear_command(console: Console, place: Path | None) -> None:
    """Removes all compiled kernels; they are made again when they are needed."""
    folder = cache_folder()
    if not can_write(folder):
        raise PlantuneError(f"{folder}: cannot be written, so no kernel was removed")
    files = [path for place in PLACES for path in _kernels(folder, place)]
    freed = sum(map(_size, files))
    for path in files:
        path.unlink(missing_ok=True)
    console.say(f"{folder}: {counted(len(files), 'kernel')} removed, {bytes_text(freed)}")
    console.emit({"folder": str(folder), "removed": len(files), "freed_bytes": freed})


def _kernels(folder: Path, place: str) -> list[Path]:
    """The files with the name of a kernel of plantune; any other in the folder is not ours."""
    named = (path for path in (folder / place).glob("*") if PLACES[place].fullmatch(path.name))
    return sorted(path for path in named if path.is_file())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
