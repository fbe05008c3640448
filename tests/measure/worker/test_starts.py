"""A worker whose process ends before it is ready."""

from __future__ import annotations

import pytest

from plantune.errors import WorkerDied
from plantune.measure.worker import client
from plantune.measure.worker.client import Worker


@pytest.mark.parametrize(
    ("how", "deaths", "starts"), [("SIGKILL", 1, 2), ("SIGKILL", 2, 2), ("exit code 1", 1, 1)]
)
def test_a_worker_that_was_killed_while_it_started_is_started_once_more(
    monkeypatch, how, deaths, starts
):
    """What it would have done is not lost for it: a search ended there."""
    asked = []

    class Killed(client.Child):
        def _await_ready(self, deadline):
            asked.append(deadline)
            if len(asked) <= deaths:
                raise WorkerDied(f"the measuring worker did not start: {how}", how)
            super()._await_ready(deadline)

    monkeypatch.setattr(client, "Child", Killed)
    with Worker(threads=1, at_once=False) as worker:
        if deaths < starts:
            worker.start()
            assert worker.pid is not None
        else:
            with pytest.raises(WorkerDied, match=how):
                worker.start()
    assert len(asked) == starts
