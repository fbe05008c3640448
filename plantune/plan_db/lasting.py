"""Whether what was stored is there for other processes, too."""

from __future__ import annotations

from pathlib import Path

from plantune.errors import PlantuneError
from plantune.paths import is_passing
from plantune.plan import Plan
from plantune.plan_db.database import PlanDatabase


def lies_in_file(path: Path | None, plan: Plan) -> bool:
    """Whether a plan that was stored is in the file, as another process would see it: where a file
    cannot be used the database was in memory.
    """
    if path is None or is_passing(path.parent):
        return False
    try:
        with PlanDatabase.open(path, read_only=True) as opened:
            return any(stored.plan == plan for stored in opened.plans())
    except PlantuneError:
        return False
