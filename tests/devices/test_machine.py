"""What a plan was made under: which change makes it another environment, which one refuses it."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.devices import machine
from plantune.devices.machine import GPU, Environment, arch_of, cpu_environment, environment_of
from plantune.errors import InvalidPlan, UnsupportedDevice
from plantune.plans.database.exports import read_export
from plantune.plans.database.stored import find_stored_plan

ROOT = Path(__file__).resolve().parents[2]
SILICON = Attrs(
    sm_count=132,
    memory_mib=143167,
    l2_kib=51200,
    mig="none",
    driver="580.95.05",
    cuda="13.0",
    cudnn="91500",
    cutlass="4.2.0.0",
)
H200 = Environment(
    "sm90", "NVIDIA H200", "0" * 16, 0, "2.11.0+cu130", "0.1.0", "NVRTC 13.0", "Linux x86_64",
    gpu=SILICON,
)  # fmt: skip


def with_gpu(**changes: object) -> Environment:
    return replace(H200, gpu=Attrs({**SILICON, **changes}))


# With what differs on a part of a GPU.
CHANGES = {
    "driver": with_gpu(driver="580.82.07"),
    "cuda": with_gpu(cuda="12.8"),
    "cudnn": with_gpu(cudnn="91000"),
    "cutlass": with_gpu(cutlass="4.3.0.0"),
    "compiler": replace(H200, compiler="NVRTC 13.1"),
    "torch": replace(H200, torch="2.12.0+cu130"),
    "plantune": replace(H200, plantune="0.2.0"),
    "device": replace(H200, device="NVIDIA H100 80GB HBM3"),
    "device_digest": replace(H200, device_digest="1" * 16),
    "sm_count": with_gpu(sm_count=114),
    "memory_mib": with_gpu(memory_mib=81559),
    "l2_kib": with_gpu(l2_kib=25600),
    "mig": with_gpu(mig="MIG"),
    "threads": replace(H200, threads=4),
    "system": replace(H200, system="Linux aarch64"),
}


def test_every_field_is_in_the_table() -> None:
    assert set(CHANGES) == set(H200.to_json()) - {"arch"}
    assert set(GPU) == set(SILICON)


@pytest.mark.parametrize("field", CHANGES)
def test_whatever_changed_the_plan_must_be_proved_again(field: str) -> None:
    """Its timings are of another environment, and it says which field it is."""
    other = CHANGES[field]
    assert other.key != H200.key
    assert H200.match(other) == other.match(H200) == "compatible"
    differences = H200.differences(other)
    assert field in differences
    assert differences[field] == (H200.to_json()[field], other.to_json()[field])
    assert len(differences) == 1


def test_another_chip_is_refused() -> None:
    """F32."""
    assert H200.match(replace(H200, arch="sm80")) == "foreign"
    assert H200.match(cpu_environment()) == "foreign"


def test_it_comes_back_as_it_was() -> None:
    for made in (H200, cpu_environment()):
        again = Environment.from_json(made.to_json())
        assert again == made
        assert again.key == made.key
        assert made.match(again) == "exact"


@pytest.mark.parametrize(
    "change", [{"sm_count": "132"}, {"driver": 13}, {"more": 1}, {"torch": None}, {"threads": 1.0}]
)
def test_other_data_is_none(change: dict[str, object]) -> None:
    with pytest.raises(InvalidPlan, match="environment"):
        Environment.from_json({**H200.to_json(), **change})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """As if torch saw a GPU; tests change what it says."""
    here = SimpleNamespace(
        name="NVIDIA H200",
        multi_processor_count=132,
        total_memory=150_122_000_000,
        L2_cache_size=52_428_800,
        major=9,
        minor=0,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # torch's CUDA build compares cuDNN's version with every GPU that it counts.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: here)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: (here.major, here.minor)
    )
    monkeypatch.setattr("plantune.devices.cuda.driver.driver_version", lambda: (13, 0))
    monkeypatch.setattr("plantune.devices.cuda.nvml.driver_release", lambda: "580.95.05")
    return here


def read() -> Environment:
    machine._gpu_environment.cache_clear()
    try:
        return environment_of(torch.device("cuda"))
    finally:
        machine._gpu_environment.cache_clear()


def test_a_gpu_is_read(gpu: SimpleNamespace) -> None:
    found = read()
    assert (found.arch, found.device, found.gpu["mig"]) == ("sm90", "NVIDIA H200", "none")
    assert (found.gpu["sm_count"], found.gpu["driver"]) == (132, "580.95.05")
    assert Environment.from_json(found.to_json()) == found


@pytest.mark.usefixtures("gpu")
def test_without_nvidias_library_the_driver_is_known_by_its_cuda_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("plantune.devices.cuda.nvml.driver_release", lambda: None)
    assert read().gpu["driver"] == "for CUDA 13.0"


def test_parts_of_a_gpu_and_virtual_ones_have_keys_of_their_own(gpu: SimpleNamespace) -> None:
    """Profiles of MIG differ by name and size; a virtual GPU has a name of its own."""
    found = [read()]
    for name, count in (
        ("NVIDIA H200 MIG 1g.18gb", 16),
        ("NVIDIA H200 MIG 2g.35gb", 32),
        ("NVIDIA H200-35C", 132),
    ):
        gpu.name, gpu.multi_processor_count = name, count
        found.append(read())
    assert [made.gpu["mig"] for made in found] == ["none", "MIG", "MIG", "none"]
    assert len({made.key for made in found}) == len({made.device_digest for made in found}) == 4
    assert all(found[0].match(other) == "compatible" for other in found[1:])


@pytest.mark.parametrize(
    ("name", "count", "memory"),
    [
        ("NVIDIA H100 80GB HBM3", 132, 85_045_673_984),
        ("NVIDIA H100 PCIe", 114, 85_045_673_984),
        ("NVIDIA H200", 132, 150_122_000_000),
        ("NVIDIA GH200 480GB", 132, 101_997_084_672),
    ],
)
def test_shipped_plans_serve_every_chip_of_their_arch(
    gpu: SimpleNamespace, tmp_path: Path, name: str, count: int, memory: int
) -> None:
    gpu.name, gpu.multi_processor_count, gpu.total_memory = name, count, memory
    here = read()
    shipped = read_export(ROOT / "plans" / "sm90.db")
    assert shipped
    for item in shipped:
        found = find_stored_plan(item.plan.problem, here, database=tmp_path / "none.db")
        assert found is not None
        assert (found.match, found.plan) == ("compatible", item.plan)


def test_a_gpu_that_plantune_does_not_know_is_named(gpu: SimpleNamespace) -> None:
    gpu.major = 6
    with pytest.raises(UnsupportedDevice, match=r"cuda:0 is sm60; plantune knows cpu, sm70"):
        arch_of(torch.device("cuda", 0))


def test_a_checkout_that_nobody_installed_has_its_version(monkeypatch):
    def missing(name):
        raise machine.PackageNotFoundError(name)

    monkeypatch.setattr(machine, "version", missing)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert machine._own_version() == project["version"]
