"""What collecting the tests leaves as it was."""

from __future__ import annotations

import gc


def test_the_garbage_collector_is_on_again() -> None:
    """Tests of leaks and of cycles would see nothing of what it does by itself."""
    assert gc.isenabled()
