"""What a kernel is launched with, each time alike."""

from __future__ import annotations

import pytest

from plantune.kernels.cuda.launcher import Launcher


@pytest.fixture
def launched(monkeypatch):
    """Launches of a kernel that was written for a chip; what they got is kept."""
    seen = []

    def make(written_for, *grid, **options):
        class Kernel:
            def __init__(self, binary, name):
                self.name, self.written_for = name, written_for

            def launch(self, stream, blocks, threads, arguments, **how):
                seen.append((self.name, stream, blocks, threads, arguments, how))

        monkeypatch.setattr("plantune.kernels.cuda.launcher.Kernel", Kernel)
        return Launcher(object(), *grid, **options), seen

    return make


def test_a_launch_has_the_grid_and_memory_of_its_kernel(launched):
    launcher, seen = launched((9, 0), (3, 5), 128, name="other", shared_bytes=4096, cluster=2)
    launcher.launch(7, "a", "b")
    how = {"shared_bytes": 4096, "cluster": (2, 1, 1), "programmatic": True}
    assert seen == [("other", 7, (3, 5, 1), 128, ("a", "b"), how)]


@pytest.mark.parametrize(
    ("written_for", "asked", "programmatic"),
    [((9, 0), True, True), ((9, 0), False, False), ((8, 9), True, False), ((12, 0), True, True)],
)
def test_only_kernels_that_wait_themselves_overlap_the_one_in_front(
    launched, written_for, asked, programmatic
):
    launcher, seen = launched(written_for, 3, 64)
    launcher.launch(0, programmatic=asked)
    (_, _, grid, _, arguments, how), *_ = seen
    assert (grid, arguments, how["programmatic"]) == ((3, 1, 1), (), programmatic)
