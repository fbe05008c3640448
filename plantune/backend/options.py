"""What `torch.compile(..., backend="plantune", options={...})` may say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from plantune.backend.allowance import Allowance
from plantune.base.given import is_number, require_kind, require_one_of, require_value
from plantune.base.nearest import hint
from plantune.runtime.captured.program_pool import ProgramPool
from plantune.runtime.module import TunedModule

# Torch's names. A piece always runs as its plan says.
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
KNOWN = ("budget",)


def allowance_of(mode: str | None, options: Mapping[str, Any] | None) -> Allowance:
    """The allowance of a module: Dynamo hands over the same options with each of its pieces.

    Raises ValueError for a mode or an option that is not known.
    """
    if mode is not None:
        require_one_of("mode", mode, MODES)
    if options is None:
        return _NONE
    wanted = "a dict such as {'budget': 60}"
    require_kind("options", options, wanted, fits=isinstance(options, Mapping))
    known = _allowances.get(id(options))
    if known is None:
        known = _allowances[id(options)] = options, Allowance(_seconds(options), search)
    return known[1]


def _seconds(options: Mapping[str, Any]) -> float:
    unknown = sorted(map(str, set(options) - {*KNOWN}))
    if unknown:
        known = f"{', '.join(KNOWN)}{hint(unknown[0], KNOWN)}"
        raise ValueError(f"unknown options: {', '.join(unknown)}; known: {known}")
    seconds = options.get("budget", 0.0)
    fits = is_number(seconds) and 0 <= seconds < math.inf
    require_value("budget", seconds, "a number of seconds, 0 or more", fits=fits)
    return float(seconds)


def search(tuned: TunedModule, pool: ProgramPool, seconds: float) -> None:
    """As `plantune.tune` does; a run without a budget loads nothing for it."""
    from plantune.graph.tracing.tape import tape_of
    from plantune.search.sought import Sought
    from plantune.tuning import reporting, search_for

    calls = tuned._calls
    derives = pool.plan.problem.mode == "train"
    tape = tape_of(tuned.reference, calls.arguments, derives=derives)
    with reporting(None) as report:
        sought = Sought(pool.graph, pool.plan.problem, tape)
        search_for(sought, calls.device, seconds, report=report)


_NONE = Allowance(0.0, search)
# With the options themselves, so that nothing else gets their id.
_allowances: dict[int, tuple[Mapping[str, Any], Allowance]] = {}
