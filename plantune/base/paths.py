"""Finds plantune's own files and the user's cache when they are asked for."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from plantune.base.warning import warn
from plantune.errors import PlantuneError

PACKAGE_FOLDER = Path(__file__).resolve().parents[1]


def data_folder(name: str) -> Path:
    """The folder of plantune's own files called `name`, such as "search_spaces".

    An installed wheel carries it inside the package, a checkout has it beside the package.
    """
    places = (PACKAGE_FOLDER / "_data" / name, PACKAGE_FOLDER.parent / name)
    for place in places:
        if place.is_dir():
            return place
    raise PlantuneError(
        f"plantune's own folder {name!r} is neither {places[0]} nor {places[1]}: "
        "this installation is incomplete, install plantune again"
    )


def cache_folder() -> Path:
    """Where plantune looks for what it kept: PLANTUNE_CACHE_DIR, else the user's cache. It may be
    one that cannot be written.

    If there is none and none can be made, a folder that is removed at the end of this process.
    """
    named = os.environ.get("PLANTUNE_CACHE_DIR")
    # Where no shell reads the variable, as in a unit file, "~" arrives as it is.
    folder = Path(os.path.expanduser(named)) if named else Path(_users_cache()) / "plantune"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    except OSError as error:
        why = error.strerror or str(error)
    return _folder_of_process(folder, why)


def can_write(folder: Path) -> bool:
    """Whether files can be made in a folder."""
    # By the user as whom the process acts, as every write is judged.
    return os.access(folder, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def writable_folder() -> Path:
    """Where plantune keeps what it can make again: the cache folder, or if that cannot be written,
    a folder that is removed at the end of this process.
    """
    folder = cache_folder()
    return folder if can_write(folder) else _folder_of_process(folder, "it is read-only")


def cache_file(*names: str, to_write: bool = False) -> Path:
    """A file of the cache, where it is read or where it is written. They differ if the cache folder
    cannot be written: what is made then is in a folder of this process.
    """
    if to_write:
        return writable_folder().joinpath(*names)
    folder = cache_folder()
    place, made = folder.joinpath(*names), _made.get(folder)
    return place if made is None or place.exists() else Path(made.name).joinpath(*names)


def _users_cache() -> str:
    """A relative XDG_CACHE_HOME does not count, as its specification says."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    return named if os.path.isabs(named) else os.path.expanduser("~/.cache")


def database_path() -> Path:
    """The user's plan database."""
    return cache_folder() / "plans.db"


def team_plans() -> tuple[Path, ...]:
    """The plan files that PLANTUNE_PLANS names; of a folder, the *.db in it."""
    named = os.environ.get("PLANTUNE_PLANS", "").split(os.pathsep)
    found: dict[Path, None] = {}
    for path in map(Path, map(os.path.expanduser, filter(None, named))):
        found.update(dict.fromkeys(sorted(path.glob("*.db")) if path.is_dir() else [path]))
    return tuple(found)


def is_said() -> bool:
    """Has a cache folder that cannot be written warned of, once; False if it can be."""
    return writable_folder() != cache_folder()


def _folder_of_process(instead_of: Path, why: str) -> Path:
    if instead_of not in _made:
        made = _made[instead_of] = tempfile.TemporaryDirectory(prefix="plantune-")
        warn(
            f"the cache folder cannot be written ({instead_of}: {why}): plans are not kept, and "
            f"kernels in {made.name} until the process ends; name another folder by "
            "PLANTUNE_CACHE_DIR"
        )
    return Path(_made[instead_of].name)


_made: dict[Path, tempfile.TemporaryDirectory[str]] = {}


def is_passing(folder: Path) -> bool:
    """Whether it is what `cache_folder` makes for one process, where no other can be written."""
    return folder.name.startswith("plantune-") and folder.parent == Path(tempfile.gettempdir())
