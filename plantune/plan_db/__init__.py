"""The plan database: trials, plans and leases in SQLite; the one place that knows sqlite-utils."""

from plantune.plan_db.database import PlanDatabase
from plantune.plan_db.exchange import export_plans, import_plans, read_export
from plantune.plan_db.leases import Lease
from plantune.plan_rows import Found, ProblemKey, StoredPlan

__all__ = [
    "Found",
    "Lease",
    "PlanDatabase",
    "ProblemKey",
    "StoredPlan",
    "export_plans",
    "import_plans",
    "read_export",
]
