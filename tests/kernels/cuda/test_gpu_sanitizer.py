"""Each family of CUDA kernels under NVIDIA's compute-sanitizer, where it is installed.

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

from plantune.kernels.cuda.cuda_family import CudaFamily
from plantune.kernels.registry import all_families

ROOT = Path(__file__).resolve().parents[3]
SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
FAMILIES = [name for name, made in all_families().items() if isinstance(made, CudaFamily)]
FOUND = 86
# The names of our kernels: others, such as torch's random numbers, take most of the time.
OURS = ("--kernel-name", "kns=run")
LIMIT_S = 900

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU"),
    pytest.mark.skipif(not Path(SANITIZER).is_file(), reason="there is no compute-sanitizer"),
]

# The step of the most ops that the family runs on two images in a network, else its sample, with
# the config that looks best. The references are cuDNN's, which fails under racecheck: there the
# kernel is launched and no more.
CHECK = """
import sys
import torch
from plantune.devices.gpus import best_arch
from plantune.graph.fusions import all_fusions
from plantune.graph.partition import alternatives
from plantune.kernels.registry import candidates, estimate_us
from plantune.measure.kernel_samples import samples
from plantune.measure.numerics import check
from plantune.measure.step_alone import TimedStep
from plantune.plans.workload import Workload
from plantune.space.search_space import load_search_space

space, family = load_search_space(best_arch()), sys.argv[1]

def of_networks():
    for network, mode in (("se_resnet9_fixup", "infer"), ("se_resnet9_fixup", "train"),
                          ("resnet18", "infer"), ("resnet18", "train")):
        graph = Workload(network, 2, 3, mode, "float16", space.arch.name).graph
        steps = alternatives(graph, tuple(all_fusions()))
        for step in sorted(steps, key=lambda step: (-len(step.nodes), step.flops)):
            legal = [c for c in candidates(step, space) if c.family == family]
            if legal:
                yield step, min(legal, key=lambda c: estimate_us(step, c, space.arch))

step, best = next(of_networks(), None) or next(
    (pair for pair in samples(space) if pair[1].family == family), (None, None))
if step is None:
    sys.exit("no step")
if sys.argv[2] == "racecheck":
    TimedStep(resolve(step, best), space.arch).launch()
    torch.cuda.synchronize()
else:
    check(step, best, space)
print(step.name, best)
"""


# A kernel without the barrier that it needs.
RACING = """
import torch
from plantune.devices.cuda.build import compile_cuda
from plantune.devices.cuda.kernel import Kernel
from plantune.devices.gpus import best_arch
from plantune.space.arch import load_arch

binary = compile_cuda(
    'extern "C" __global__ void run(int* y) { __shared__ int s[64]; s[threadIdx.x] = threadIdx.x;'
    " y[threadIdx.x] = s[63 - threadIdx.x]; }",
    load_arch(best_arch()),
)
y = torch.zeros(64, dtype=torch.int32, device="cuda")
Kernel(binary).launch(torch.cuda.current_stream().cuda_stream, (1, 1, 1), 64, [y])
torch.cuda.synchronize()
"""


def checked(tool: str, place: Path, *python: str) -> subprocess.CompletedProcess[str]:
    # The driver's answers to what its bindings try on the way are no errors of ours.
    options = ["--tool", tool, *OURS, "--error-exitcode", str(FOUND)]
    options += ["--report-api-errors", "no"] if tool == "memcheck" else []
    return subprocess.run(
        [SANITIZER, *options, sys.executable, "-W", "ignore", "-c", *python],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        cwd=place,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_finds_nothing(family: str, tool: str, tmp_path: Path) -> None:
    done = checked(tool, tmp_path, CHECK, family, tool)
    if "no step" in done.stderr:
        pytest.skip(f"{family} has no step on this GPU")
    told = done.stdout[:6000] + done.stderr[-2000:]
    assert done.returncode == 0, told
    assert re.findall(r"SUMMARY: (\d+) ", done.stdout) == ["0"], told


def test_it_finds_a_race(tmp_path: Path) -> None:
    done = checked("racecheck", tmp_path, RACING)
    assert done.returncode == FOUND, done.stdout[:6000] + done.stderr[-2000:]
