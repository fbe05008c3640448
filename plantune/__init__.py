"""plantune finds the fastest kernels and fusions for a small network and runs it from that plan."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from plantune.errors import PlantuneError

if TYPE_CHECKING:
    from plantune.plans.plan import Plan
    from plantune.runtime.check import check
    from plantune.runtime.load import load_model, optimize
    from plantune.runtime.module import TunedModule, UnplannedCall
    from plantune.training.lamb import LAMB
    from plantune.training.loss_scale import LossScale
    from plantune.training.step import TrainStep
    from plantune.tuning import tune

__version__ = "0.1.0"
__all__ = [
    "LAMB",
    "LossScale",
    "Plan",
    "PlantuneError",
    "TrainStep",
    "TunedModule",
    "UnplannedCall",
    "__version__",
    "check",
    "load_model",
    "optimize",
    "tune",
]
# What needs torch is imported when it is first asked for, so that the command line answers at once.
_HOMES = {
    "LAMB": "plantune.training.lamb",
    "LossScale": "plantune.training.loss_scale",
    "TrainStep": "plantune.training.step",
    "Plan": "plantune.plans.plan",
    "TunedModule": "plantune.runtime.module",
    "UnplannedCall": "plantune.runtime.module",
    "check": "plantune.runtime.check",
    "load_model": "plantune.runtime.load",
    "optimize": "plantune.runtime.load",
    "tune": "plantune.tuning",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
