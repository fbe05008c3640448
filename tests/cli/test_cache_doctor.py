"""cache and doctor: the machine and the folder that plantune works in."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from plantune.base import blobs
from plantune.cli import checks
from plantune.cli.checks import LIMITED, MISSING, OK, Check
from plantune.plans.plan import Plan

from .conftest import Run, object_of


@pytest.fixture
def kernels(cache: Path) -> Path:
    folder = cache / "cpu"
    folder.mkdir(parents=True)
    for number in range(3):
        (folder / f"{number:064x}.so").write_bytes(b"x" * 1000)
    (folder / "notes.txt").write_text("not a kernel")
    (folder / "mine.so").write_text("not one of ours")
    return folder


def test_the_cache_is_shown(run: Run, kernels: Path, cache: Path) -> None:
    data = object_of(run("cache", "show", "--json"))
    assert data["folder"] == str(cache)
    assert data["kernels"] == {"cpu": {"files": 3, "bytes": 3000}}


def test_clearing_removes_kernels_and_nothing_else(
    run: Run, kernels: Path, store: Callable[..., int], plan: Plan
) -> None:
    store(plan)
    data = object_of(run("cache", "clear", "--json"))
    assert (data["removed"], data["freed_bytes"]) == (3, 3000)
    assert sorted(path.name for path in kernels.iterdir()) == ["mine.so", "notes.txt"]
    assert len(object_of(run("plans", "list", "--json"))["plans"]) == 1
    assert object_of(run("cache", "clear", "--json"))["removed"] == 0


@pytest.mark.usefixtures("compiled_before")
def test_doctor_says_what_is_there(run: Run) -> None:
    result = run("doctor", "--json")
    assert result.exit_code == 0
    data = object_of(result)
    assert data["can_run"] is True
    found = {check["name"]: check for check in data["checks"]}
    assert {"python", "torch", "oneDNN", "C++ compiler", "cache folder", "plan database"} <= set(
        found
    )
    assert {"threads", "optuna", "matplotlib", "CUDA driver", "CUDA GPU", "NVRTC"} <= set(found)
    assert found["torch"]["status"] == OK
    assert all(check["how"] for check in found.values() if check["status"] != OK)


@pytest.mark.usefixtures("compiled_before")
def test_doctor_names_what_is_missing_and_how_to_get_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    result = run("doctor")
    assert result.exit_code == 0
    assert "C++ compiler: none was found" in result.stdout
    assert "apt install g++" in result.stdout


def test_doctor_says_that_another_user_owns_the_kernels(
    run: Run, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs.os, "geteuid", lambda: os.getuid() + 1)
    result = run("doctor")
    assert "compiled kernels are not kept" in result.stdout
    assert "set PLANTUNE_CACHE_DIR to a folder of your own" in result.stdout


def test_doctor_fails_where_plantune_cannot_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Check("torch", MISSING, "no module named torch", "pip install torch", required=True)
    monkeypatch.setattr(checks, "_torch", lambda: broken)
    assert "plantune cannot run here" in run("doctor").stdout
    result = run("doctor", "--json")
    assert result.exit_code == 1
    assert object_of(result)["can_run"] is False


def test_doctor_is_asked_for_an_arch(run: Run) -> None:
    result = run("doctor", "--arch", "sm90")
    assert result.exit_code == 6
    assert "sm90" in result.stderr


def test_doctor_sees_a_cache_that_cannot_be_written(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(tmp_path / "file" / "below"))
    data = object_of(run("doctor", "--json"))
    found = {check["name"]: check["status"] for check in data["checks"]}
    assert found["cache folder"] == LIMITED
    assert found["plan database"] == LIMITED


@pytest.mark.usefixtures("compiled_before")
def test_doctor_names_a_network_file_system(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plantune.plans.database.mounts.network_file_system", lambda path: "nfs4")
    assert "network file system (nfs4)" in run("doctor").stdout
