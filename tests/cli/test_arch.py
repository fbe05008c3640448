"""Which processor is meant where nobody says it."""

from __future__ import annotations

import pytest

from plantune.cli import cuda_checks
from plantune.cli.bench import _chosen_routes
from plantune.cli.checks import LIMITED, OK
from plantune.cli.lookup import environment_here
from plantune.devices import gpus as gpus_module
from plantune.devices.gpus import LocalGpu
from plantune.devices.machine import cpu_environment
from plantune.plans.workload import Workload

from .conftest import Run, object_of

H200 = LocalGpu(0, "NVIDIA H200", (9, 0), 140 << 30)
GIVEN = {"network": "se_resnet9_fixup", "batch": 128, "in_channels": 3, "mode": "infer"}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus_module, "gpus_here", lambda: (H200,))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus_module, "gpus_here", tuple)


@pytest.mark.usefixtures("gpu")
def test_with_a_gpu_it_is_meant() -> None:
    key = Workload.on(arch=None, dtype=None, **GIVEN)
    assert (key.arch, key.dtype) == ("sm90", "float16")
    assert key.arguments() == "--batch 128"
    other = Workload.on(arch="cpu", dtype=None, **GIVEN)
    assert (other.arch, other.dtype) == ("cpu", "float32")
    assert other.arguments() == "--batch 128 --arch cpu"


@pytest.mark.usefixtures("no_gpu")
def test_without_one_it_is_the_cpu() -> None:
    key = Workload.on(arch=None, dtype=None, **GIVEN)
    assert (key.arch, key.dtype) == ("cpu", "float32")
    assert key.arguments() == "--batch 128"
    assert Workload.on(arch="sm90", dtype="bfloat16", **GIVEN).dtype == "bfloat16"


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("command", ["search", "bench", "verify", "profile"])
def test_what_measures_needs_the_gpu(run: Run, command: str) -> None:
    result = run(command, "--arch", "sm90", "--json")
    assert result.exit_code == 6
    message = object_of(result)["error"]["message"]
    assert "sm90 needs a GPU of compute capability 9.0; torch sees no CUDA GPU here" in message
    assert "use --arch cpu" in message


@pytest.mark.usefixtures("gpu")
def test_another_gpu_is_named(run: Run) -> None:
    result = run("search", "--arch", "sm80")
    assert result.exit_code == 6
    assert "here is NVIDIA H200 (sm90); use --arch sm90" in result.stderr


@pytest.mark.usefixtures("no_gpu")
def test_the_environment_of_an_arch_that_is_not_here_is_foreign_to_it() -> None:
    assert environment_here("sm90") == environment_here("cpu") == cpu_environment()


def test_each_arch_has_its_routes() -> None:
    cpu, gpu = (Workload.on(arch=arch, dtype=None, **GIVEN) for arch in ("cpu", "sm90"))
    on_cpu = {*_chosen_routes(None, cpu)}
    assert {"eager", "torchscript", "compile-default", "compile-frozen"} < on_cpu
    assert "cuda-graph" not in on_cpu
    assert {"cuda-graph", "compile-reduce-overhead", "compile-best"} < {*_chosen_routes(None, gpu)}
    assert _chosen_routes("cuda-graph, eager", gpu) == ("cuda-graph", "eager")


@pytest.mark.usefixtures("gpu")
def test_doctor_shows_gpus() -> None:
    found = cuda_checks._gpus()
    assert (found.status, found.detail) == (OK, "NVIDIA H200 (sm90), 140.0 GiB")


def test_doctor_names_gpus_that_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    old = LocalGpu(1, "Tesla P100", (6, 0), 16 << 30)
    monkeypatch.setattr(gpus_module, "gpus_here", lambda: (H200, old))
    found = cuda_checks._gpus()
    assert found.status == LIMITED
    assert "Tesla P100 (sm60), 16.0 GiB" in found.detail
    assert "plantune knows cpu, sm70" in found.how


def test_doctor_says_why_kernels_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from plantune.devices.cuda import choice, toolchain

    new = next(one for one in toolchain.all_nvrtc() if one.version >= (13, 0))
    monkeypatch.setattr(choice, "all_nvrtc", lambda: (new,))
    found = cuda_checks._kernels()
    assert found.status == LIMITED
    assert found.detail == "can be compiled for sm75, sm80, sm86, sm89, sm90, sm100, sm120"
    assert "no NVRTC here compiles for sm70" in found.how
    for module in (choice, toolchain):
        monkeypatch.setattr(module, "all_nvrtc", tuple)
    found = cuda_checks._kernels()
    assert (found.detail, found.how) == ("can be compiled for no GPU", cuda_checks.NVRTC_HOW)
    assert (
        cuda_checks.families_check("sm90").how == cuda_checks.NVRTC_HOW
    )  # its pip line is told once
    assert cuda_checks._nvrtc().status == LIMITED
