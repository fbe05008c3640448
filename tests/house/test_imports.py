"""What importing and running plantune brings into a process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# The search, the command line, the plan database and the report use these; a run needs none.
# sympy would take 0.26 s of a first call (2 cores of an AMD EPYC, 2026-11-20).
NOT_FOR_A_RUN = {"optuna", "click", "sqlite_utils", "matplotlib", "sympy"}
# What torch itself loads when it traces.
BY_TORCH = {"torch", "sympy", "mpmath", "numpy"}
# Seconds to import, and for inductor's steps alone.
COMPILERS = {"torch._dynamo", "torch._inductor"}

REPORT = "import json, sys; print(json.dumps(sorted(sys.modules)))"
RUN = """
import torch, plantune
model = plantune.load_model("se_resnet9_fixup", batch=1, mode="train")
model(torch.randn(1, 3, 64, 64)).sum().backward()
model.eval()
with torch.no_grad():
    model(torch.randn(1, 3, 64, 64))
model = plantune.optimize(torch.nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8))
model(torch.randn(1, 3, 8, 8))
"""
OPS_BEFORE_A_CAPTURE = """
import json, torch
from plantune.devices.cuda.workspaces import KeptProducts
with KeptProducts():
    torch.ones(2).permute(0)
"""
IMPORTED = """
import json, sys
import torch
before = set(sys.modules)
import plantune
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def outcome(code: str) -> Any:
    """What the code prints as JSON, in a process of its own."""
    quiet = "ignore:Failed to initialize NumPy:UserWarning"
    command = [sys.executable, "-W", quiet, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(autouse=True)
def _no_stored_plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(tmp_path / "cache"))


def test_a_run_needs_torch_alone() -> None:
    loaded = set(outcome(RUN + REPORT))
    assert {"torch", "plantune.runtime.program.program"} <= loaded
    assert loaded & (NOT_FOR_A_RUN | COMPILERS) == set()
    foreign = {name.partition(".")[0] for name in loaded - set(outcome("import torch\n" + REPORT))}
    assert foreign - set(sys.stdlib_module_names) - BY_TORCH == {"plantune"}


def test_the_passes_before_a_capture_need_no_compiler() -> None:
    assert set(outcome(OPS_BEFORE_A_CAPTURE + REPORT)) & COMPILERS == set()


def test_the_import_brings_no_more_than_a_name_and_the_errors() -> None:
    """Everything else is loaded when it is first used, so that the import takes no time."""
    assert outcome(IMPORTED) == ["plantune", "plantune.errors"]
