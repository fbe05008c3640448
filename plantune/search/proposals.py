"""What Optuna does: it keeps the ledger of trials, one study a step, which `optuna-dashboard`
shows, and its TPE proposes configs where a space is too large to try them in order.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy

from plantune.canonical import canonical, digest
from plantune.graph.step import Step
from plantune.kernels.family import Candidate
from plantune.measure.outcome import Measured, Outcome

CHOICE = "candidate"
Distribution = optuna.distributions.BaseDistribution
STORAGE_FAULTS = (optuna.exceptions.StorageInternalError, sqlalchemy.exc.SQLAlchemyError)


def storage_url(path: Path) -> str:
    """Optuna's storage in a file of plantune's own, whatever its path holds."""
    return sqlalchemy.URL.create("sqlite", database=str(path)).render_as_string()


def opened(storage: str | None) -> optuna.storages.BaseStorage:
    """The storage behind an Optuna URL; None is one in memory.

    Optuna never closes the connections it pools. Without a pool each one closes after its use.
    """
    if storage is None or not storage.startswith("sqlite"):
        return optuna.storages.get_storage(storage)
    unpooled = {"poolclass": sqlalchemy.pool.NullPool}
    return optuna.storages.get_storage(optuna.storages.RDBStorage(storage, unpooled))


class Ledger:
    """Studies by step. `storage` is an Optuna URL, None keeps them in memory."""

    def __init__(self, storage: str | None, seed: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._storage = opened(storage)
        self._seed = seed
        self._studies: dict[str, optuna.Study] = {}

    def keep(
        self, step: Step, candidate: Candidate, choices: Sequence[Candidate], outcome: Outcome
    ) -> None:
        """Writes down what became of a candidate of a step.

        A storage that fails (full disk, damaged file) is given up for one in memory with a warning:
        the plan database holds every outcome, the ledger is for looking at.
        """
        # Asking a study for the trial first and telling it later took four times as long.
        trial = _trial(candidate, choices, outcome)
        try:
            self._study(step, choices).add_trial(trial)
        except STORAGE_FAULTS as error:
            warnings.warn(f"Optuna's storage failed, it goes on in memory: {error}", stacklevel=2)
            self._storage = optuna.storages.InMemoryStorage()
            self._studies.clear()
            self._study(step, choices).add_trial(trial)

    def _study(self, step: Step, choices: Sequence[Candidate]) -> optuna.Study:
        space = digest([choice.to_json() for choice in choices])[:8]
        name = f"{'+'.join(step.ops)[:60]} {step.signature[:12]} {space}"
        if name not in self._studies:
            self._studies[name] = optuna.create_study(
                storage=self._storage,
                study_name=name,
                sampler=optuna.samplers.TPESampler(seed=self._seed),
                load_if_exists=True,
            )
        return self._studies[name]


def _trial(
    candidate: Candidate, choices: Sequence[Candidate], outcome: Outcome
) -> optuna.trial.FrozenTrial:
    """A rejected candidate is FAIL with its reason, never a large number."""
    texts = tuple(canonical(choice.to_json()) for choice in choices)
    params = {CHOICE: canonical(candidate.to_json())}
    known: dict[str, Distribution] = {CHOICE: optuna.distributions.CategoricalDistribution(texts)}
    if isinstance(outcome, Measured):
        return optuna.trial.create_trial(
            params=params, distributions=known, value=outcome.median_us
        )
    return optuna.trial.create_trial(
        params=params,
        distributions=known,
        state=optuna.trial.TrialState.FAIL,
        user_attrs={"stage": outcome.stage, "reason": outcome.reason[:500]},
    )


class TpeProposer:
    """Draws configs by TPE from what was tried so far; each draw starts from the same seed."""

    def __init__(self, seed: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._seed = seed

    def propose(
        self, tried: Mapping[Candidate, float | None], left: Sequence[Candidate], wanted: int
    ) -> list[Candidate]:
        """Some of those that are left, all different; fewer where draws repeat themselves."""
        axes = _axes([*tried, *left])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna calls some of these options experimental
            sampler = optuna.samplers.TPESampler(
                seed=self._seed + len(tried),
                n_startup_trials=0,
                multivariate=True,
                constant_liar=True,
            )
        study = optuna.create_study(sampler=sampler)
        for candidate, time in tried.items():
            study.add_trial(_finished(candidate, time, axes))
        by_params = {_params(candidate): candidate for candidate in left}
        found: dict[Candidate, None] = {}
        for _ in range(DRAWS * wanted):
            drawn = study.ask(axes)
            match = by_params.get(canonical(drawn.params))
            if match is not None:
                found[match] = None
            if len(found) == wanted:
                break
        return list(found)


DRAWS = 4


def _axes(candidates: Sequence[Candidate]) -> dict[str, Distribution]:
    """Each axis of the configs with the values that occur."""
    values: dict[str, dict[Any, None]] = {}
    for candidate in candidates:
        for name, value in candidate.config.items():
            values.setdefault(name, {})[value] = None
    categorical = optuna.distributions.CategoricalDistribution
    return {name: categorical(tuple(found)) for name, found in values.items()}


def _params(candidate: Candidate) -> str:
    return canonical(dict(candidate.config))


def _finished(
    candidate: Candidate,
    time: float | None,
    axes: dict[str, Distribution],
) -> optuna.trial.FrozenTrial:
    state = optuna.trial.TrialState.FAIL if time is None else optuna.trial.TrialState.COMPLETE
    params = {name: candidate.config[name] for name in axes}
    return optuna.trial.create_trial(params=params, distributions=axes, value=time, state=state)
