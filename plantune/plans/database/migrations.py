"""The history of the schema. A migration that was released never changes; a new one is added.

When the columns in `plan_rows` change, the ones of then are written out here.
"""

from __future__ import annotations

from sqlite_utils import Database, Migrations

from plantune.plans.database import rows

LEASES = dict.fromkeys(
    ("key", "token", "pid", "process_start", "host", "boot", "heartbeat"), rows.TEXT
)
# What a database of this schema holds, with the names of each table's key.
TABLES = {
    "meta": (rows.META, ["key"]),
    "environments": (rows.ENVIRONMENTS, ["key"]),
    "trials": (rows.TRIALS, ["step", "candidate", "environment"]),
    "plans": (rows.PLANS, ["id"]),
    "leases": (LEASES, ["key"]),
}

migrations = Migrations("plantune")


@migrations()
def m001_tables(db: Database) -> None:
    for table, (columns, key) in TABLES.items():
        db.execute(rows.create_sql(table, columns, key))


def migrate(db: Database) -> None:
    """Brings the schema up to date; to be called inside a transaction."""
    migrations.apply(db)
    put_version(db)


def put_index(db: Database) -> None:
    """Of plans by what calls look for, where it is missing. It is no migration: whatever does not
    know it reads and writes the same rows.
    """
    db.execute(rows.index_sql())


def put_version(db: Database) -> None:
    version = {"key": rows.SCHEMA_KEY, "value": str(rows.SCHEMA_VERSION)}
    db.table("meta").insert(version, replace=True)
