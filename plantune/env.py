"""What plantune reads from its surroundings, each on request: where its own files lie."""

from __future__ import annotations

from pathlib import Path

from plantune.errors import PlantuneError

PACKAGE_FOLDER = Path(__file__).resolve().parent


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
