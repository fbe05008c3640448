"""Imported files are believed in no value: what plantune would not write is refused."""

from __future__ import annotations

import itertools
import json
import os
import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plantune.base.canonical import Attrs, canonical, digest
from plantune.devices.machine import Environment
from plantune.errors import InvalidPlan
from plantune.kernels.family import Candidate
from plantune.plans.database.exports import export_plans, import_plans, read_export
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.rows import StoredPlan, checksum
from plantune.plans.plan import Choice, Plan

from .conftest import rows_of

MakePlan = Callable[..., Plan]
DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000


def rewrite(path: Path, table: str, **values: Any) -> None:
    """Changes the first row and makes its checksum right again, as an attacker would."""
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        row = {**connection.execute(f"SELECT * FROM {table}").fetchone()}
        rowid = connection.execute(f"SELECT min(rowid) FROM {table}").fetchone()[0]
        row.update(values)
        row["sha256"] = checksum(table, row)
        names = ", ".join(f"{name} = ?" for name in row)
        connection.execute(f"UPDATE {table} SET {names} WHERE rowid = {rowid}", [*row.values()])
        connection.commit()


def rewrite_plan(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the JSON of the first plan, and every column and checksum with it."""
    data = next(iter(rows_of(path, "plans")))
    plan = json.loads(data["plan"])
    change(plan)
    columns = {name: plan[name] for name in plan.keys() & data.keys()}
    rewrite(path, "plans", **columns, plan=canonical(plan))


def assert_refused(path: Path, target: PlanDatabase, match: str) -> None:
    with pytest.raises(InvalidPlan, match=match) as caught:
        import_plans(path, target)
    assert str(path) in str(caught.value)
    assert target.plans() == ()


def test_one_bad_plan_among_good_ones_stops_them_all(exported: Path, target: PlanDatabase) -> None:
    rewrite_plan(exported, lambda plan: plan.update(mode="fly"))
    assert_refused(exported, target, "mode: must be one of infer, train, got 'fly'")


def set_config(**config: Any) -> Callable[[dict[str, Any]], object]:
    return lambda plan: plan["choices"][0]["config"].update(config)


def set_choice(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda plan: plan["choices"][0].update(fields)


def set_plan(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda plan: plan.update(fields)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (set_config(tile_m=10**9), r"choices\[0\].config"),
        (set_config(split_k=-4), r"choices\[0\].config"),
        (set_config(layout='"; system("rm -rf /")'), r"choices\[0\].config"),
        (set_config(layout="../../etc/passwd"), r"choices\[0\].config"),
        (set_config(prepack=1), r"choices\[0\].config"),
        (set_config(prepack="true"), r"choices\[0\].config"),
        (set_config(layout=["nhwc"]), r"choices\[0\].config"),
        (set_config(layout={"deep": {}}), r"choices\[0\].config"),
        (set_choice(config={}), r"choices\[0\].config"),
        (set_choice(config=[]), r"choices\[0\].config"),
        (set_choice(family="hopper_conv"), r"choices\[0\].family: must be one of"),
        (set_choice(family="../framework"), r"choices\[0\].family: must be one of"),
        (set_choice(family="of_tomorrow", config={"a b": 1}), r"choices\[0\].config"),
        (set_choice(family="of_tomorrow", config={"a": "x" * 10_000}), r"choices\[0\].config"),
        (set_choice(nodes=[]), r"choices\[0\].nodes"),
        (set_choice(nodes=["../../etc/passwd"]), r"choices\[0\].nodes"),
        (set_choice(nodes=["/etc/passwd"]), r"choices\[0\].nodes"),
        (set_choice(nodes=['a"; system()']), r"choices\[0\].nodes"),
        (set_choice(nodes=["a" * 10_000]), r"choices\[0\].nodes"),
        (set_choice(nodes=["a\nb"]), r"choices\[0\].nodes"),
        (set_choice(nodes=["twice", "twice"]), r"choices\[0\].nodes"),
        (set_choice(unknown=1), r"choices\[0\]: fields missing or unknown: unknown"),
        (set_plan(choices=[]), "choices: must be at least one"),
        (set_plan(unknown=1), "plan: fields missing or unknown: unknown"),
        (set_plan(format=2), "format: this plantune reads 1, got 2"),
        (set_plan(network="../../net"), "network: must be a name"),
        (set_plan(network="net'; DROP TABLE plans"), "network: must be a name"),
        (set_plan(network="n" * 1000), "network: must be a name"),
        (set_plan(graph="a" * 63), "graph: must be a sha256"),
        (set_plan(graph="A" * 64), "graph: must be a sha256"),
        (set_plan(arch="sm90"), r"choices\[0\].family|environment.arch"),
        (set_plan(arch="../cpu"), "arch: must be one of"),
        (set_plan(batch=0), "batch: must be"),
        (set_plan(batch=-8), "batch: must be"),
        (set_plan(batch=10**12), "batch: must be"),
        (set_plan(batch=True), "plan.batch: must be int"),
        (set_plan(batch=8.0), "plan.batch: must be int"),
        (set_plan(dtype="float31"), "dtype: must be one of"),
        (set_plan(origin="gift"), "origin: must be one of"),
        (set_plan(evidence={"median_ms": "\x1b[2J"}), "evidence.median_ms"),
        (set_plan(evidence={"median_ms": "x" * 10_000}), "evidence.median_ms"),
        (set_plan(evidence={"a b": 1}), "evidence: must be names"),
        (set_plan(evidence={"a": None}), "evidence: a: must be a number"),
        (set_plan(evidence={"a": 10**400}), "evidence.a"),
        (set_plan(evidence=[]), "plan.evidence: must be dict"),
    ],
)
def test_a_value_that_plantune_would_not_write_is_refused_by_its_place(
    exported: Path, target: PlanDatabase, change: Callable[[dict[str, Any]], object], place: str
) -> None:
    rewrite_plan(exported, change)
    assert_refused(exported, target, place)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "not JSON"),
        ("null", "must be an object"),
        ("[]", "must be an object"),
        (DEEP, "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"evidence": {"ratio": NaN}}', "NaN is not a number"),
        ('{"evidence": {"ratio": -Infinity}}', "Infinity is not a number"),
        ("9" * 5000, "not JSON"),
        (None, "is damaged"),
        (b"\xff\xfe", "is damaged|not JSON"),
        (7, "must be an object"),
    ],
)
def test_text_that_is_not_a_plan_is_refused(
    exported: Path, target: PlanDatabase, text: object, fault: str
) -> None:
    with closing(sqlite3.connect(exported)) as connection:
        connection.execute("UPDATE plans SET plan = ? WHERE id = 1", (text,))
        connection.commit()
    assert_refused(exported, target, fault)


def test_numbers_too_large_for_a_float_are_refused(exported: Path, target: PlanDatabase) -> None:
    text = rows_of(exported, "plans")[0]["plan"].replace('"ratio":0.625', '"ratio":1e999')
    rewrite(exported, "plans", plan=text)
    assert_refused(exported, target, "evidence: ratio: must be finite")


@pytest.mark.parametrize("spelling", ["{}  ", " {}", "{}\n"], ids=["behind", "before", "a line"])
def test_a_plan_in_other_words_is_refused(
    exported: Path, target: PlanDatabase, spelling: str
) -> None:
    text = spelling.format(rows_of(exported, "plans")[0]["plan"])
    rewrite(exported, "plans", plan=text)
    assert_refused(exported, target, "does not match")


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        ({"median_ms": 0.001}, "a column does not match"),
        ({"origin": "hand"}, "a column does not match"),
        ({"median_ms": None}, "a column does not match"),
        ({"network": "another"}, "key is not that of its plan"),
        ({"batch": 8.5}, "key is not that of its plan"),
        ({"status": "partial"}, "only complete plans"),
        ({"status": "done"}, "status"),
        ({"created_at": "yesterday"}, "created_at"),
        ({"environment": "0" * 64}, "environment"),
    ],
)
def test_columns_that_contradict_the_plan_are_refused(
    exported: Path, target: PlanDatabase, columns: dict[str, Any], fault: str
) -> None:
    with closing(sqlite3.connect(exported)) as connection:
        connection.execute("DELETE FROM plans WHERE id = 2")
        connection.commit()
    rewrite(exported, "plans", **columns)
    assert_refused(exported, target, fault)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"device": "\x1b]0;owned\x07"}, "environment.device"),
        ({"device": "x" * 10_000}, "environment.device"),
        ({"threads": "two"}, "environment.threads"),
        ({"threads": 10**30}, "environment.threads"),
        ({"arch": "sm90"}, "environment.arch"),
        ({"unknown": "1"}, "environment: needs the fields"),
    ],
)
def test_an_environment_that_plantune_would_not_write_is_refused(
    exported: Path, target: PlanDatabase, here: Environment, changes: dict[str, Any], fault: str
) -> None:
    data = {**here.to_json(), **changes}
    columns = {name: data[name] for name in ("arch", "device")}
    rewrite(exported, "environments", key=digest(data), json=canonical(data), **columns)
    with closing(sqlite3.connect(exported)) as connection:
        connection.execute("DELETE FROM plans WHERE id = 2")
        connection.commit()
    rewrite(exported, "plans", environment=digest(data))
    assert_refused(exported, target, fault)


@pytest.mark.parametrize(
    "sql",
    [
        "CREATE TRIGGER t AFTER INSERT ON plans BEGIN DELETE FROM plans; END",
        "CREATE VIEW v AS SELECT * FROM plans",
        "CREATE TABLE more (a)",
        "CREATE INDEX i ON plans (lower(network))",
        "ALTER TABLE plans ADD COLUMN more",
        "DROP TABLE environments",
        "DELETE FROM plans",
        "UPDATE meta SET value = '2'",
        "UPDATE meta SET value = '01'",
        "INSERT INTO meta VALUES ('more', '1')",
        "INSERT INTO environments (key) VALUES ('more')",
    ],
)
def test_a_file_with_another_schema_is_refused(
    exported: Path, target: PlanDatabase, sql: str
) -> None:
    with closing(sqlite3.connect(exported)) as connection:
        connection.execute(sql)
        connection.commit()
    assert_refused(exported, target, str(exported))


def test_a_file_truncated_anywhere_is_refused(exported: Path, target: PlanDatabase) -> None:
    content = exported.read_bytes()
    lengths = {*range(0, len(content), 499), 1, 15, 16, 99, 100, 511, 512, len(content) - 1}
    for length in sorted(lengths):
        exported.write_bytes(content[:length])
        assert_refused(exported, target, str(exported))


def test_a_huge_file_is_refused_without_reading_it(
    tmp_path: Path, target: PlanDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "huge.db"
    with open(path, "wb") as file:
        file.write(b"SQLite format 3\0")
        file.truncate(1 << 40)
    assert_refused(path, target, "is larger than")


def test_many_plans_are_refused(
    exported: Path, target: PlanDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plantune.plans.database.exports.PLANS_LIMIT", 1)
    assert_refused(exported, target, "must hold 1 to 1 plans, got 2")


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "missing", "device"])
def test_what_is_not_a_regular_file_is_refused(
    exported: Path, tmp_path: Path, target: PlanDatabase, kind: str
) -> None:
    (tmp_path / "link").symlink_to(exported)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    path = Path("/dev/zero") if kind == "device" else tmp_path / kind
    assert_refused(path, target, "symbolic link|regular|cannot be read")


def test_a_text_and_a_working_database_are_not_exports(
    tmp_path: Path, database: PlanDatabase, target: PlanDatabase
) -> None:
    (tmp_path / "text").write_text("a plan " * 1000)
    assert_refused(tmp_path / "text", target, "is not an exported plan")
    assert database.path is not None
    assert_refused(database.path, target, "plantune export")


def test_an_import_that_fails_while_writing_leaves_nothing(
    exported: Path, target: PlanDatabase
) -> None:
    first, second = read_export(exported)
    broken = replace(
        second, plan=replace(second.plan, problem=replace(second.plan.problem, batch=1 << 80))
    )
    with pytest.raises(OverflowError):
        target.put_plans([first, broken])
    assert target.plans() == ()


@pytest.mark.parametrize("flips", [1500, pytest.param(30_000, marks=pytest.mark.slow)])
def test_one_flipped_byte_is_refused_or_means_the_same(
    exported: Path, tmp_path: Path, flips: int
) -> None:
    content = exported.read_bytes()
    original = read_export(exported)
    refused = 0
    for position, bit in flipped_bits(len(content), flips):
        flipped = bytearray(content)
        flipped[position] ^= 1 << bit
        # Written over in place: making a file each time would be most of the test.
        with open(exported, "r+b") as file:
            file.write(flipped)
        refused += is_refused(exported, original)
    assert flips / 10 < refused < flips


def flipped_bits(size: int, count: int) -> Iterator[tuple[int, int]]:
    choice = random.Random(54)
    everywhere = [divmod(choice.randrange(size * 8), 8) for _ in range(count)]
    # The header decides how all the rest is read.
    header = itertools.product(range(100), range(8))
    yield from itertools.islice(itertools.chain(header, everywhere), count)


def is_refused(path: Path, original: tuple[StoredPlan, ...]) -> bool:
    try:
        assert read_export(path) == original
    except InvalidPlan:
        return True
    return False


def test_a_config_of_another_arch_is_refused(
    database: PlanDatabase, tmp_path: Path, here: Environment, make_plan: MakePlan
) -> None:
    gpu = Attrs(
        tile_m=128, tile_n=64, tile_k=32, warp_m=32, warp_n=32, stages=3, split_k=1, swizzle=1,
        split_mode="serial", math="mma",
    )  # fmt: skip
    choice = Choice(("conv/conv2d",), Candidate("implicit_gemm_conv", gpu))
    there = replace(here, arch="sm90")
    database.put_plan(make_plan(arch="sm90", choices=(choice,)), there)
    export_plans(database, tmp_path / "sm90.db", "sm90")
    assert read_export(tmp_path / "sm90.db")[0].plan.choices == (choice,)

    huge = replace(choice, candidate=Candidate("implicit_gemm_conv", Attrs(gpu, tile_m=10**9)))
    database.put_plan(make_plan(arch="sm90", choices=(huge,)), there)
    with pytest.raises(InvalidPlan, match="in the search space of sm90"):
        export_plans(database, tmp_path / "sm90.db", "sm90")
    database.put_plan(make_plan(choices=(choice,)), here)
    with pytest.raises(InvalidPlan, match="family: must be one of framework"):
        export_plans(database, tmp_path / "cpu.db", "cpu")
