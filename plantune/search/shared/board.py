"""What several searches share: one study of Optuna, in which each claims what it measures.

Every row is a trial of the study and has one of three roles. A *search* stays alive by its
heartbeat. A *trial* holds a few candidates that a search measures, then their outcomes. A *rank* is
the right to rank and race, then the plan. If two rows claim one candidate, the earlier one counts:
row numbers are given under a lock. Any search closes the rows of one that ended or fell silent.
"""

from __future__ import annotations

import inspect
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from plantune.base.jsonable import to_json
from plantune.base.outcome import Measured, Outcome
from plantune.devices.machine import Environment
from plantune.errors import ForeignSearch
from plantune.plans.planner.candidates import Key, StepCandidate
from plantune.search.shared.board_rows import (
    BY,
    ENVIRONMENT,
    HOST,
    ITEMS,
    OUTCOME,
    PHASE,
    PID,
    PLAN,
    RANK,
    REPORTED,
    ROLE,
    ROW,
    SEARCH,
    TRIAL,
    Row,
    SharedSearch,
    key_of,
    rows_of,
    text_of,
)
from plantune.search.shared.rdb import FAULTS, Persistent

MEASURING, WAITING = "measuring", "waiting"
# A text in MySQL has 65,535 bytes; JSON in JSON takes up to twice as many as it has characters.
PART = 30_000
# Without the warning that heartbeats are experimental: another thread's filters would change.
end_silent = inspect.unwrap(optuna.storages.fail_stale_trials)
GONE = (optuna.exceptions.UpdateFinishedTrialError, KeyError)
Say = Callable[[str], None]


class Board:
    """One search's view of the study. Call `join` first and `leave` in the end; one thread uses it,
    and `beat` may be called by another.
    """

    def __init__(
        self, shared: SharedSearch, environment: Environment, does: Persistent, say: Say
    ) -> None:
        self._shared = shared
        self._storage = shared.storage
        self._environment = environment
        self._do = does
        self._say = say
        self._study: optuna.Study | None = None
        self._me: Row | None = None
        # By candidate its row and its place there; by row how many are not reported yet, and the
        # times of the others.
        self._claims: dict[Key, tuple[int, int]] = {}
        self._open: dict[int, int] = {}
        self._values: dict[int, list[float]] = {}
        self._rank: int | None = None
        self._unseen: dict[int, float] = {}
        self._elsewhere: set[str] = set()
        self._read_to_the_end: set[int] = set()
        self._known: set[tuple[int, int]] = set()
        self._found: set[str] = set()
        self._place_among = 0, 1  # of the living searches
        self._earlier: list[tuple[Key, Outcome]] = []

    def join(self, *, fresh: bool = False) -> None:
        """Joins the unfinished search, even an abandoned one, or begins a new one after the last
        found its plan. A new one knows the outcomes of earlier ones in this environment unless it
        is `fresh`.

        Raises ForeignSearch if the unfinished one measures on another machine or software.
        """
        names = self._do(self._shared.studies)
        goes_on = bool(names) and self._goes_on(names[-1], fresh=fresh)
        for name in [] if fresh else names[: len(names) - goes_on]:
            self._earlier += self._found_in(name)
        name = names[-1] if goes_on else self._shared.next_name(len(names))
        self._study = self._do(lambda: self._opened(name))
        self._register()
        first = next(row for row in self._rows() if row.role == SEARCH)
        theirs = Environment.from_json(first.attributes[ENVIRONMENT])
        for what, (here, there) in self._environment.differences(theirs).items():
            self.leave()
            raise ForeignSearch(
                f"{name!r} measures on {theirs.device} ({first.attributes[HOST]}): {what} there is "
                f"{there}, here {here}; times would not compare, so give another --storage"
            )

    def leave(self) -> None:
        """Gives back unfinished claims, so that others take them at once. If the database is gone,
        they do so when this search counts as silent.
        """
        if self._me is None:
            return
        me, self._me = self._me, None
        rank = [] if self._rank is None else [self._rank]
        with suppress(*FAULTS):
            for id in (*self._open, *rank, me.id):
                with suppress(*GONE):
                    self._storage.set_trial_state_values(id, TrialState.FAIL)
        self._forget()

    def beat(self, state: Mapping[str, Any]) -> None:
        """Sends a heartbeat with what this search does, and ends silent searches. Raises database
        errors: the next beat makes up for it.
        """
        me, study = self._me, self._study
        if me is None or study is None:
            return
        self._storage.record_heartbeat(me.id)  # type: ignore[attr-defined]
        with suppress(*GONE):
            self._storage.set_trial_user_attr(me.id, REPORTED, dict(state))
        end_silent(study)
        self._end_unseen()

    def new_outcomes(self) -> list[tuple[Key, Outcome]]:
        """What other searches found since the last call."""
        rows = self._rows()
        self._stay(rows)
        ended = {row.number for row in rows if row.role == SEARCH and not row.is_open}
        found, self._earlier = self._earlier, []
        self._elsewhere = set()
        for row in rows:
            if row.role == SEARCH or row.id in self._read_to_the_end:
                continue
            if row.is_open and row.by in ended:
                self._end(row.id)
            found += self._new_in(row)
            if row.is_open and row.by not in ended and row.by != self._number:
                self._elsewhere.update(row.taken)
        living = [row.number for row in rows if row.role == SEARCH and row.is_open]
        if self._number in living:
            self._place_among = living.index(self._number), len(living)
        return found

    def _new_in(self, row: Row) -> list[tuple[Key, Outcome]]:
        """What is new in a row of another search; a finished one is not looked at again."""
        found = []
        for place, text in enumerate(row.texts):
            outcome = None if (row.id, place) in self._known else row.outcome_at(place)
            if outcome is not None:
                self._known.add((row.id, place))
                self._found.add(text)
                found += [(key_of(text), outcome)] if row.by != self._number else []
        if not row.is_open:
            self._read_to_the_end.add(row.id)
        return found

    @property
    def searches(self) -> int:
        return self._place_among[1]

    def spread(self, candidates: Sequence[StepCandidate]) -> list[StepCandidate]:
        """The candidates in an order in which searches begin at different ones."""
        place, searches = self._place_among
        start = len(candidates) * place // searches
        return [*candidates[start:], *candidates[:start]]

    def has(self, candidate: StepCandidate) -> bool:
        return text_of(candidate) in self._elsewhere

    def claim(self, *candidates: StepCandidate) -> list[StepCandidate]:
        """Takes as many of the candidates as a row has room for, and gives those that no other
        search has, or had; none if this search was silent meanwhile.
        """
        texts = fitting(map(text_of, candidates))
        self._do(lambda: self._add(TRIAL, {ITEMS: texts}, self._number))
        rows = [r for r in self._rows() if r.role == TRIAL and r.id not in self._read_to_the_end]
        own = [r for r in rows if r.by == self._number and r.is_open and r.texts == texts]
        if not own:
            return []
        row, *again = own
        for other in again:  # added twice, as a connection broke
            self._end(other.id)
        earlier = (r for r in rows if r.number < row.number and r.by != self._number)
        taken = {*self._found, *(text for r in earlier for text in r.taken)}
        self._elsewhere |= taken.intersection(texts)
        won = [place for place, text in enumerate(texts) if text not in taken]
        self._claims |= {candidates[place].key: (row.id, place) for place in won}
        self._open[row.id], self._values[row.id] = len(won), []
        if not won:
            self._close(row.id)
        return [candidates[place] for place in won]

    def report(self, candidate: StepCandidate, outcome: Outcome | None) -> None:
        """Gives the outcome of a claim to the others; None gives the claim back. Where the claim
        was ended meanwhile, because this search was silent, the outcome is dropped.
        """
        id, place = self._claims.pop(candidate.key, (-1, 0))
        if id not in self._open:
            return
        if outcome is not None:
            name, data = f"{OUTCOME} {place}", to_json(outcome)
            with suppress(*GONE):
                self._do(lambda: self._storage.set_trial_user_attr(id, name, data))
        if isinstance(outcome, Measured):
            self._values[id].append(outcome.median_us)
        self._open[id] -= 1
        if not self._open[id]:
            self._close(id)

    def _close(self, id: int) -> None:
        """Ends a row of which nothing is measured any more; its value is the best time in it."""
        del self._open[id]
        values = sorted(self._values.pop(id))[:1]
        state = TrialState.COMPLETE if values else TrialState.FAIL
        with suppress(*GONE):
            self._do(lambda: self._storage.set_trial_state_values(id, state, values or None))

    def turn(self) -> str | bool:
        """Once nothing is left to measure here: the plan that was found, True if this search shall
        rank and race, False while it has to wait for others.
        """
        rows, me = self._rows(), self._number
        self._stay(rows)
        ranks = [row for row in rows if row.role == RANK]
        plan = next((row.plan for row in ranks if row.plan is not None), None)
        if plan is not None:
            return plan
        living = {row.number: row for row in rows if row.role == SEARCH and row.is_open}
        others = [row for number, row in living.items() if number != me]
        if any(row.attributes.get(PHASE, MEASURING) == MEASURING for row in others):
            return False
        if any(row.is_open and row.by in living and row.by != me for row in ranks):
            return False
        return self._claimed_rank()

    def publish(self, plan: str, value: float) -> bool:
        """Gives the plan to all; False if others ended this search's claim to rank meanwhile,
        because it was silent. Nothing is given, and all is well, without such a claim.
        """
        id, self._rank = self._rank, None
        if id is None:
            return True

        def write() -> None:
            for number, start in enumerate(range(0, len(plan), PART)):
                part = plan[start : start + PART]
                self._storage.set_trial_user_attr(id, f"{PLAN} {number}", part)
            self._storage.set_trial_state_values(id, TrialState.COMPLETE, [value])

        with suppress(*GONE):
            self._do(write)
        # A connection that broke may have written it all the same.
        return any(row.id == id and row.plan == plan for row in self._rows())

    def wait_for_turn(self) -> None:
        """Tells the others that nothing is left to measure here."""
        me = self._me
        if me is not None:
            with suppress(*GONE):
                self._do(lambda: self._storage.set_trial_user_attr(me.id, PHASE, WAITING))

    @property
    def _number(self) -> int:
        return -1 if self._me is None else self._me.number

    def _claimed_rank(self) -> str | bool:
        """Whether this search's row is the first open one of its role, after one was added, which
        is ended if it is not; the plan if another search was done between the look and the claim.
        """
        self._do(lambda: self._add(RANK, {}, self._number))
        rows = [row for row in self._rows() if row.role == RANK]
        plan = next((row.plan for row in rows if row.plan is not None), None)
        open_ones = [row for row in rows if row.is_open]
        for row in open_ones[plan is None :]:
            if row.by == self._number:
                self._end(row.id)
        if plan is not None:
            return plan
        self._rank = next((r.id for r in open_ones[:1] if r.by == self._number), None)
        return self._rank is not None

    def _add(self, role: str, what: Mapping[str, Any], by: int) -> int:
        assert self._study is not None
        trial = optuna.trial.create_trial(
            state=TrialState.RUNNING, user_attrs={ROW: {ROLE: role, BY: by, **what}}
        )
        trial.datetime_start = datetime.now()
        return self._storage.create_new_trial(self._study._study_id, trial)

    def _register(self) -> None:
        """Adds this search's row. If it is added twice, the second is never updated and expires."""
        what = {HOST: platform.node(), PID: os.getpid(), ENVIRONMENT: self._environment.to_json()}
        id = self._do(lambda: self._add(SEARCH, {**what, PHASE: MEASURING}, 0))
        self._me = next(row for row in self._rows() if row.id == id)
        self._do(lambda: self.beat({}))

    def _end_unseen(self) -> None:
        """Ends searches that were killed before their first heartbeat, once they are silent."""
        now, rows = time.monotonic(), self._read()
        searches = [row for row in rows if row.role == SEARCH and row.is_open]
        unseen = [row.id for row in searches if REPORTED not in row.attributes]
        self._unseen = {id: self._unseen.get(id, now) for id in unseen}
        for id, since in self._unseen.items():
            if now - since > self._shared.patience.silent_s:
                with suppress(*GONE):
                    self._storage.set_trial_state_values(id, TrialState.FAIL)

    def _stay(self, rows: Iterable[Row]) -> None:
        """Joins again after others ended this search because it was silent."""
        me = self._me
        if me is not None and any(row.id == me.id and not row.is_open for row in rows):
            self._say("this search was silent for too long and lost what it measured; it goes on")
            self._forget()
            self._register()

    def _forget(self) -> None:
        for claims in (self._claims, self._open, self._values):
            claims.clear()

    def _end(self, id: int) -> None:
        with suppress(*GONE):
            self._do(lambda: self._storage.set_trial_state_values(id, TrialState.FAIL))

    def _opened(self, name: str) -> optuna.Study:
        return optuna.create_study(storage=self._storage, study_name=name, load_if_exists=True)

    def _rows(self) -> list[Row]:
        return self._do(self._read)

    def _read(self) -> list[Row]:
        assert self._study is not None
        return list(rows_of(self._storage.get_all_trials(self._study._study_id, deepcopy=False)))

    def _rows_of(self, name: str) -> list[Row]:
        def read() -> list[FrozenTrial]:
            study = self._opened(name)
            end_silent(study)
            return study.get_trials(deepcopy=False)

        return list(rows_of(self._do(read)))

    def _goes_on(self, name: str, *, fresh: bool) -> bool:
        """Whether to join. After an outage of the database all searches look silent; in the same
        environment one may return, so there must not be a second study.
        """
        rows = self._rows_of(name)
        if any(row.role == RANK and row.plan is not None for row in rows):
            return False
        searches = [row for row in rows if row.role == SEARCH]
        if any(row.is_open for row in searches) or not searches:
            return True
        same = searches[0].attributes[ENVIRONMENT] == self._environment.to_json()
        return same and not fresh

    def _found_in(self, name: str) -> list[tuple[Key, Outcome]]:
        """The outcomes of an earlier search in this environment."""
        rows = self._rows_of(name)
        first = next((row for row in rows if row.role == SEARCH), None)
        if first is None or first.attributes.get(ENVIRONMENT) != self._environment.to_json():
            return []
        return [found for row in rows if row.role == TRIAL for found in row.reported]


def fitting(texts: Iterable[str]) -> list[str]:
    """The first texts, as many as one attribute of a row has room for, but at least one."""
    kept: list[str] = []
    size = 0
    for text in texts:
        size += len(text)
        if kept and size > PART:
            break
        kept.append(text)
    return kept
