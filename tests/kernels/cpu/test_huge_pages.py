"""Large memory of a CPU's kernels is in huge pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from plantune.graph.layouts import HOST_MEMORY
from plantune.kernels.cpu import huge_pages
from plantune.kernels.cpu.huge_pages import HUGE_BYTES, in_huge_pages
from plantune.kernels.cpu.onednn import Geometry, is_there, pack
from plantune.runtime.program.binding import fresh

THERE = Path("/sys/kernel/mm/transparent_hugepage/enabled").exists()
offered = pytest.mark.skipif(not THERE, reason="this system has no huge pages on request")


def is_wanted_at(address: int) -> bool:
    """Whether the system was asked for huge pages there."""
    for part in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", part):
            low, high = (int(end, 16) for end in found.groups())
            if low <= address < high:
                return " hg" in part.rpartition("VmFlags:")[2]
    raise AssertionError(f"nothing is at {address:x}")


@offered
@pytest.mark.skipif(not is_there(), reason="this torch was built without oneDNN")
def test_packed_weights_are_in_huge_pages_and_right() -> None:
    weight = torch.randn(512, 512, 3, 3)
    packed = pack(weight, Geometry((1, 1)), (1, 512, 4, 4))
    assert packed.is_mkldnn
    assert is_wanted_at(torch.ops.mkldnn.data_ptr(packed) + HUGE_BYTES)
    x = torch.randn(1, 512, 4, 4)
    y = torch.ops.mkldnn._convolution_pointwise(
        x, packed, None, [1, 1], [1, 1], [1, 1], 1, "none", [], ""
    )
    torch.testing.assert_close(y, torch.conv2d(x, weight, padding=1), rtol=1e-4, atol=1e-3)


@offered
def test_so_is_the_memory_of_a_program() -> None:
    arena = fresh(4 * HUGE_BYTES, HOST_MEMORY)
    assert is_wanted_at(arena.data_ptr() + HUGE_BYTES)
    assert arena.fill_(7).eq(7).all()


@pytest.mark.parametrize("size", [0, 1, HUGE_BYTES - 1])
def test_what_is_small_stays_as_it_is(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_madvise", lambda: pytest.fail("there is no room for a page"))
    memory = torch.empty(size, dtype=torch.uint8)
    assert in_huge_pages(memory) is memory


def test_where_the_kernel_refuses_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_madvise", lambda: lambda *where: -1)
    memory = torch.ones(4 * HUGE_BYTES, dtype=torch.uint8)
    assert in_huge_pages(memory) is memory
    assert memory.eq(1).all()
