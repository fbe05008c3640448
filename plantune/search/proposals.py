"""The ledger of trials, kept by Optuna: one study a step, which `optuna-dashboard` shows.

The search says which candidate comes next: the spaces of the CPU are small enough for it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from pathlib import Path

import optuna
import sqlalchemy

from plantune.graph.step import Step
from plantune.kernels.family import Candidate
from plantune.measure.outcome import Measured, Outcome
from plantune.values import canonical, digest

CHOICE = "candidate"
STORAGE_FAULTS = (optuna.exceptions.StorageInternalError, sqlalchemy.exc.SQLAlchemyError)


def storage_url(path: Path) -> str:
    """Optuna's storage in a file of plantune's own."""
    return f"sqlite:///{path}"


class Ledger:
    """Studies by step. `storage` is an Optuna URL, None keeps them in memory."""

    def __init__(self, storage: str | None, seed: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._storage = optuna.storages.get_storage(storage)
        self._seed = seed
        self._studies: dict[str, optuna.Study] = {}

    def ask(self, step: Step, candidate: Candidate, choices: Sequence[Candidate]) -> Asked:
        """Opens a trial for a candidate of a step.

        A storage that fails (full disk, damaged file) is given up for one in memory with a warning:
        the plan database holds every outcome, the ledger is for looking at.
        """
        try:
            return self._ask(step, candidate, choices)
        except STORAGE_FAULTS as error:
            warnings.warn(f"Optuna's storage failed, it goes on in memory: {error}", stacklevel=2)
            self._storage = optuna.storages.InMemoryStorage()
            self._studies.clear()
            return self._ask(step, candidate, choices)

    def _ask(self, step: Step, candidate: Candidate, choices: Sequence[Candidate]) -> Asked:
        study = self._study(step, choices)
        text = canonical(candidate.to_json())
        study.enqueue_trial({CHOICE: text})
        trial = study.ask()
        trial.suggest_categorical(CHOICE, [canonical(choice.to_json()) for choice in choices])
        return Asked(study, trial)

    def _study(self, step: Step, choices: Sequence[Candidate]) -> optuna.Study:
        space = digest([choice.to_json() for choice in choices])[:8]
        name = f"{'+'.join(step.ops)[:60]} {step.signature[:12]} {space}"
        if name not in self._studies:
            study = optuna.create_study(
                storage=self._storage,
                study_name=name,
                sampler=optuna.samplers.TPESampler(seed=self._seed),
                load_if_exists=True,
            )
            _end_orphans(study)
            self._studies[name] = study
        return self._studies[name]


class Asked:
    """An open trial."""

    def __init__(self, study: optuna.Study, trial: optuna.Trial) -> None:
        self._study = study
        self._trial = trial

    def tell(self, outcome: Outcome) -> None:
        """A rejected candidate is FAIL with its reason, never a large number.

        Where the storage fails, the trial stays open; the next `ask` deals with the storage.
        """
        with contextlib.suppress(*STORAGE_FAULTS):
            self._tell(outcome)

    def _tell(self, outcome: Outcome) -> None:
        if isinstance(outcome, Measured):
            self._study.tell(self._trial, outcome.median_us)
            return
        self._trial.set_user_attr("stage", outcome.stage)
        self._trial.set_user_attr("reason", outcome.reason[:500])
        self._study.tell(self._trial, state=optuna.trial.TrialState.FAIL)


def _end_orphans(study: optuna.Study) -> None:
    """A kill leaves a trial running, which nothing will ever finish."""
    running = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
    for trial in running:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
