"""tools/test runs every check, and any that fails is its own failure."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ..conftest import ROOT

CHECKS = ("ruff", "mypy", "pytest")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with tools/test, and checks that say their names."""
    for folder in ("tools", "bin"):
        (tmp_path / folder).mkdir()
    (tmp_path / "tools" / "test").write_bytes((ROOT / "tools" / "test").read_bytes())
    (tmp_path / "tools" / "set_up").write_text("set_up() { :; }\n")
    for name in CHECKS:
        path = tmp_path / "bin" / name
        path.write_text(f'#!/bin/sh\necho "{name} $*"\n[ "$FAILS" != {name} ] || exit 5\n')
        path.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(("fails", "code"), [("", 0), ("ruff", 5), ("mypy", 1), ("pytest", 5)])
def test_any_check_that_fails_counts(checkout: Path, fails: str, code: int) -> None:
    path = f"{checkout / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(checkout / "tools" / "test"), "-k", "relu"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": path, "FAILS": fails, "TMPDIR": str(checkout)},
    )
    assert done.returncode == code, done.stderr
    said = [line.split()[0] for line in done.stdout.splitlines()]
    assert set(said) == ({"ruff"} if fails == "ruff" else set(CHECKS))
    assert fails == "ruff" or "-k relu" in done.stdout
    assert not list(checkout.glob("tmp.*"))
