"""plantune finds the fastest kernels and fusions for a small network and runs it from that plan."""

from plantune.errors import PlantuneError
from plantune.plan import Plan
from plantune.runtime.load import load_model, optimize
from plantune.runtime.module import TunedModule, UnplannedCall

__version__ = "0.1.0"
__all__ = [
    "Plan",
    "PlantuneError",
    "TunedModule",
    "UnplannedCall",
    "__version__",
    "load_model",
    "optimize",
]
