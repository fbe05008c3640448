"""Whether this process had to wait for a core: then its times are those of the others too."""

from __future__ import annotations

import os

TASKS = "/proc/self/task"


def waited_ns() -> int:
    """How long the threads of this process have waited for a core so far, as Linux counts it.

    0 if the kernel does not count it.
    """
    total = 0
    try:
        for task in os.listdir(TASKS):
            with open(f"{TASKS}/{task}/schedstat", "rb") as file:
                total += int(file.read().split()[1])
    except (OSError, IndexError, ValueError):
        return total
    return total
