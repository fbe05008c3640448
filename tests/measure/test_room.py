"""What a network needs of memory, and what is free, on machines that are files."""

from __future__ import annotations

from pathlib import Path

import pytest

from plantune.cli.exit_codes import NO_DEVICE, exit_code
from plantune.devices.device import CPU
from plantune.errors import NotEnoughMemory
from plantune.measure import room
from plantune.measure.room import free_bytes, needed_bytes, require_room
from plantune.plans.workload import Workload

NAME = "se_resnet9_fixup"


def test_what_is_needed_grows_with_the_batch_and_with_a_backward_pass() -> None:
    small, large, larger = (needed_bytes(Workload(NAME, n).graph) for n in (8, 4008, 8008))
    assert larger - large == pytest.approx(large - small, rel=1e-3)
    assert larger - large > 4000 * 3 * 32 * 32 * 8  # the images alone, exactly
    assert needed_bytes(Workload(NAME, 8008, mode="train").graph) > 2 * larger


def test_it_is_refused_with_what_is_needed_and_what_is_there(monkeypatch) -> None:
    workload = Workload(NAME, 60000)
    needed = needed_bytes(workload.graph)
    monkeypatch.setattr(room, "free_bytes", lambda device: needed)
    assert require_room(workload.graph, workload.problem) == needed
    monkeypatch.setattr(room, "free_bytes", lambda device: None)
    assert require_room(workload.graph, workload.problem) == needed
    monkeypatch.setattr(room, "free_bytes", lambda device: needed // 3)
    with pytest.raises(NotEnoughMemory) as refused:
        require_room(workload.graph, workload.problem)
    assert (refused.value.needed, refused.value.free) == (needed, needed // 3)
    assert exit_code(refused.value) == NO_DEVICE
    assert f"at batch 60000 needs about {needed / 2**30:.1f} GiB" in str(refused.value)
    assert f"{needed / 3 / 2**30:.1f} GiB are free here; batch 16384 has room" in str(refused.value)


def test_this_machine_has_some() -> None:
    assert free_bytes(CPU) > 1 << 28


def machine(root: Path, cgroup: str, **files: object) -> Path:
    """A file system with these files; in their names __ is a slash."""
    for name, content in {"proc__self__cgroup": cgroup, **files}.items():
        path = root / name.replace("__", "/").replace("-", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def group(place: str, limit: str, used: str, values: tuple[object, int, int], key: str) -> dict:
    most, taken, droppable = values
    return {
        f"{place}__{limit}": most,
        f"{place}__{used}": taken,
        f"{place}__memory.stat": f"anon 1\n{key} {droppable}",
    }


def test_control_groups_of_both_versions_count(tmp_path: Path) -> None:
    top = "sys__fs__cgroup"
    new = ("memory.max", "memory.current")
    root = machine(
        tmp_path / "new",
        "0::/user/me",
        **group(f"{top}__user", *new, (1000, 700, 100), "inactive_file"),
        **group(f"{top}__user__me", *new, ("max", 300, 0), "inactive_file"),
    )
    assert list(room._free_in_group(root)) == [400]
    old = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    root = machine(
        tmp_path / "old",
        "5:cpu:/x\n4:memory:/x\n0::/",
        **group(f"{top}__memory__x", *old, (5000, 1000, 500), "total_inactive_file"),
        **group(f"{top}__memory", *old, (9000, 1000, 0), "total_inactive_file"),
    )
    assert list(room._free_in_group(root)) == [4500, 8000]


def test_where_nothing_tells_nothing_is_known(tmp_path: Path) -> None:
    assert list(room._free_in_group(tmp_path)) == []
    assert list(room._free_in_system(tmp_path / "meminfo")) == []
