"""F9 and F10: each family of CUDA kernels under NVIDIA's compute-sanitizer, where it is installed.

It sees what guard bands cannot: accesses far outside, in shared memory, and races there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from plantune.kernels.cuda_family import CudaFamily
from plantune.kernels.registry import all_families

ROOT = Path(__file__).resolve().parents[2]
SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
FAMILIES = [name for name, made in all_families().items() if isinstance(made, CudaFamily)]
FOUND = 86
RACES_OF_PYTORCH = re.compile(
    "Error: Race reported between (?:Read|Write) access at void at::native::.*\n"
    "=========     and (?:Read|Write) access at void at::native::"
)
LIMIT_S = 900

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU"),
    pytest.mark.skipif(not Path(SANITIZER).is_file(), reason="there is no compute-sanitizer"),
]

# The step of the most ops that the family runs on two images, with the config that looks best.
CHECK = """
import sys
from plantune.device import best_arch
from plantune.graph.fusions import all_fusions
from plantune.graph.partition import alternatives
from plantune.kernels.registry import candidates, estimate_us
from plantune.measure.numerics import check
from plantune.problem import Problem
from plantune.space.search_space import load_search_space

space, family = load_search_space(best_arch()), sys.argv[1]
for network, mode in (("se_resnet9_fixup", "infer"), ("se_resnet9_fixup", "train"),
                      ("resnet18", "infer")):
    graph = Problem(network, 2, 3, mode, "float16", space.arch.name).graph
    steps = alternatives(graph, tuple(all_fusions()))
    for step in sorted(steps, key=lambda step: (-len(step.nodes), step.flops)):
        legal = [c for c in candidates(step, space) if c.family == family]
        if legal:
            best = min(legal, key=lambda c: estimate_us(step, c, space.arch))
            print(step.name, best, check(step, best, space))
            sys.exit(0)
sys.exit("no step")
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_finds_nothing(family: str, tool: str, tmp_path: Path) -> None:
    # The driver's answers to what its bindings try on the way are no errors of ours.
    options = ["--tool", tool, "--error-exitcode", str(FOUND)]
    options += ["--report-api-errors", "no"] if tool == "memcheck" else []
    done = subprocess.run(
        [SANITIZER, *options, sys.executable, "-W", "ignore", "-c", CHECK, family],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if "no step" in done.stderr:
        pytest.skip(f"{family} has no step on this GPU")
    told = done.stdout[:6000] + done.stderr[-2000:]
    assert done.returncode in (0, FOUND), told
    (reported,) = re.findall(r"SUMMARY: (\d+) ", done.stdout)
    assert int(reported) == len(RACES_OF_PYTORCH.findall(done.stdout)), told
