"""What golden files need of the package: the one place to change when names move."""

from plantune.base.paths import data_folder
from plantune.cli import main as command_line
from plantune.errors import PlantuneError
from plantune.graph.fusions import all_fusions
from plantune.graph.graph import Graph
from plantune.graph.partition import alternatives
from plantune.kernels.registry import all_families, candidates, family_named
from plantune.measure.kernel_samples import samples
from plantune.models.registry import network_names
from plantune.plans.checked_plan import check_plan
from plantune.plans.database.exports import read_export
from plantune.plans.database.stored import find_stored_plan
from plantune.plans.guess import framework_plan, guessed_plan, hand_plan
from plantune.plans.plan import Plan, named_as
from plantune.plans.workload import Workload
from plantune.space.arch import ARCH_NAMES
from plantune.space.search_space import SearchSpace, load_search_space

__all__ = [
    "ARCH_NAMES",
    "Graph",
    "Plan",
    "PlantuneError",
    "SearchSpace",
    "Workload",
    "all_families",
    "all_fusions",
    "alternatives",
    "candidates",
    "check_plan",
    "command_line",
    "data_folder",
    "family_named",
    "find_stored_plan",
    "framework_plan",
    "guessed_plan",
    "hand_plan",
    "load_search_space",
    "named_as",
    "network_names",
    "read_export",
    "samples",
]
