"""Computes a shared search, event by event: hosts with slots and one database. Nothing waits."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from replay import Job

# The part of its share that a search claims, and what a row has room for at least.
PART, MOST = 4, 64


@dataclass(frozen=True)
class Costs:
    """Seconds of one claim of a batch while the study is locked, and of what goes beside others':
    the rest of a claim, an outcome, and the news before every claim. A batch is a part of the
    host's share of what is left, at least twice its slots and `least`.
    """

    locked_s: float
    claim_s: float
    tell_s: float
    news_s: float
    least: int = 4


FREE = Costs(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Computed:
    """`efficiency` is the part of all slots' time in which they measured, `best_s` when the best
    candidate was known, `locked` the part of the time in which the study was locked.
    """

    seconds: float
    efficiency: float
    best_s: float
    claims_per_s: float
    locked: float


class _Host:
    """One search: a thread that claims and tells, one after the other, for slots that measure. It
    claims as many candidates ahead as it has slots.
    """

    def __init__(self, slots: int) -> None:
        self.clock = 0.0
        self.most = slots if slots == 1 else 2 * slots
        self.batch: list[int] = []
        self.slots = slots
        self._free_at = [0.0] * slots
        self.running: list[tuple[float, int]] = []

    def begin(self, job: int, busy_s: float) -> float:
        """Gives a job to the slot that is free first; returns when it ends."""
        end = max(self.clock, heapq.heappop(self._free_at)) + busy_s
        heapq.heappush(self._free_at, end)
        heapq.heappush(self.running, (end, job))
        return end


def simulate(jobs: Sequence[Job], workers: int, costs: Costs, slots: int = 8) -> Computed:
    """The lock of the study serves one claim at a time, whoever asks first."""
    hosts = [_Host(min(slots, workers - start)) for start in range(0, workers, slots)]
    turns = [(0.0, number) for number in range(len(hosts))]
    best = min(range(len(jobs)), key=lambda number: jobs[number].us)
    next_job, claims, unlocked, best_s, end_s = 0, 0, 0.0, 0.0, 0.0
    while turns:
        _, number = heapq.heappop(turns)
        host = hosts[number]
        if host.running and host.running[0][0] <= host.clock:
            _, done = heapq.heappop(host.running)
            host.clock += costs.tell_s
            best_s = host.clock if done == best else best_s
        elif host.batch and len(host.running) < host.most:
            job = host.batch.pop(0)
            end_s = max(end_s, host.begin(job, jobs[job].busy_s))
        elif next_job < len(jobs) and len(host.running) < host.most:
            unlocked = max(host.clock + costs.news_s, unlocked) + costs.locked_s
            host.clock = unlocked + costs.claim_s
            part = (len(jobs) - next_job) // (PART * len(hosts))
            size = max(2 * host.slots, costs.least, min(part, MOST))
            host.batch = list(range(next_job, min(next_job + size, len(jobs))))
            next_job += len(host.batch)
            claims += 1
        elif host.running:
            host.clock = host.running[0][0]
        else:
            continue  # nothing is left for it
        heapq.heappush(turns, (host.clock, number))
    busy_s = sum(job.busy_s for job in jobs)
    locked = claims * costs.locked_s / end_s
    return Computed(end_s, busy_s / (workers * end_s), best_s, claims / end_s, locked)
