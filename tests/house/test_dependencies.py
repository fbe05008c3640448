"""What pip is asked for: enough for torch's CUDA builds, and nothing that decides which torch."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
]


def requirements(extra: str | None = None) -> dict[str, Requirement]:
    lists = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    return {found.name: found for found in map(Requirement, lists)}


def test_torchs_cuda_13_builds_get_the_headers_that_they_lack() -> None:
    """They name cuda-toolkit in their own release, so a version here would argue with them."""
    found = requirements()["cuda-toolkit"]
    assert found.extras == {"cccl", "crt"}
    assert not found.specifier


@pytest.mark.parametrize("release", ["12.6", "12.8", "12.9"])
def test_torchs_cuda_12_builds_have_an_extra_for_each_release(release: str) -> None:
    found = requirements("cu" + release.replace(".", ""))
    assert set(found) == {"nvidia-cuda-cccl-cu12", "nvidia-cuda-nvcc-cu12"}
    assert {str(one.specifier) for one in found.values()} == {f"=={release}.*"}


@pytest.mark.parametrize("extra", [None, "dev", "cudnn", "plot"])
def test_the_users_torch_is_the_users_choice(extra: str | None) -> None:
    """torch pins its CUDA packages: a release of one of them here would choose a torch."""
    named = {
        name: str(found.specifier)
        for name, found in requirements(extra).items()
        if re.match(r"cuda-|nvidia-cuda-|torch$", name)
    }
    assert {spec for spec in named.values() if spec} <= {">=2.9"}


def test_cudnn_is_taken_in_releases_that_need_no_proprietary_package() -> None:
    specifier = requirements("cudnn")["nvidia-cudnn-frontend"].specifier
    offered = [f"1.{minor}.0" for minor in range(24, 34)]
    assert list(specifier.filter(offered)) == ["1.26.0", "1.27.0", "1.28.0"]


def test_what_developers_install_has_one_known_good_version() -> None:
    pinned = {found.name for found in CONSTRAINTS}
    wanted = {*requirements(), *requirements("dev")}
    assert wanted <= pinned
