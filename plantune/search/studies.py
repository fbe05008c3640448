"""What Optuna does: its studies keep every trial, where `optuna-dashboard` and later searches read
them, and its TPE proposes configs if there are too many to try in order.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy

from plantune.base.canonical import Attrs, canonical, digest
from plantune.base.jsonable import from_json, to_json
from plantune.base.outcome import Outcome, Rejected, is_noisy
from plantune.base.storage_urls import without_secrets
from plantune.base.warning import warn
from plantune.kernels.family import Candidate
from plantune.plans.planner.candidates import Cluster, Key, StepCandidate, heaviest_node
from plantune.plans.precisions import precisions_of

Axes = dict[str, optuna.distributions.BaseDistribution]
STORAGE_FAULTS = (optuna.exceptions.StorageInternalError, sqlalchemy.exc.SQLAlchemyError)
STEP, OUTCOME = "step", "outcome"  # attributes of a trial
REASON_LENGTH = 500
# Draws for each proposal that is asked for: some repeat each other, or are not legal.
DRAWS = 4


def storage_url(path: Path) -> str:
    """The URL of Optuna's storage in a file, whatever characters its path has."""
    return sqlalchemy.URL.create("sqlite", database=str(path)).render_as_string()


def opened(storage: str | None) -> optuna.storages.BaseStorage:
    """The storage of an Optuna URL; None is one in memory.

    Optuna never closes the connections that it pools. Without a pool each one closes after its use.
    """
    if storage is None or not storage.startswith("sqlite"):
        return optuna.storages.get_storage(storage)
    unpooled = {"poolclass": sqlalchemy.pool.NullPool}
    return optuna.storages.get_storage(optuna.storages.RDBStorage(storage, unpooled))


class Studies:
    """One study per cluster: the configs of a family at steps that do similar work.

    `storage` is an Optuna URL, None keeps trials in memory. `scope` names what times depend on
    besides: only searches of the same scope and `arch` share studies. With `fresh` their trials
    are not read.
    """

    def __init__(
        self,
        storage: str | None,
        seed: int,
        scope: str = "",
        *,
        arch: str = "cpu",
        fresh: bool = False,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._url = storage or ""
        self._storage = opened(storage)
        self._seed = seed
        self._scope, self._arch = scope, arch
        self._earlier = set() if fresh else {*optuna.get_all_study_names(self._storage)}
        self._studies: dict[str, optuna.Study] = {}
        self._named: dict[Cluster, tuple[str, Axes]] = {}

    def recorded(
        self, candidate: StepCandidate, configs: Sequence[Candidate]
    ) -> dict[Key, Outcome]:
        """What earlier searches recorded in the cluster of a candidate, which has these configs."""
        if not self._earlier:
            return {}
        name, _ = self._name_and_axes(candidate, configs)
        if name not in self._earlier:
            return {}
        try:
            trials = self._study(name).get_trials(deepcopy=False)
        except STORAGE_FAULTS as error:
            self._give_up(error)
            return {}
        return dict(_known(trials, candidate.candidate.family))

    def record(
        self,
        candidate: StepCandidate,
        configs: Sequence[Candidate],
        outcome: Outcome,
        relative: float | None,
    ) -> None:
        """Adds the trial of a candidate, with its time relative to an estimate for the step.

        If the storage fails (full disk, damaged file), trials stay in memory, with a warning: the
        plan database has every outcome.
        """
        name, axes = self._name_and_axes(candidate, configs)
        known = {STEP: candidate.step.signature, OUTCOME: _brief(outcome)}
        trial = _finished(candidate.candidate, relative, axes, known)
        try:
            # Asking a study for the trial first and telling it later took four times as long.
            self._study(name).add_trial(trial)
        except STORAGE_FAULTS as error:
            self._give_up(error)

    def propose(
        self, tried: Mapping[Candidate, float | None], left: Sequence[Candidate], wanted: int
    ) -> list[Candidate]:
        """Some of the configs that are left, all different; fewer if draws repeat themselves.
        `tried` has a time for each, None for a failure.

        Draws are made in a study of their own: most of them never run. Each call starts from the
        same seed.
        """
        axes = _axes([*tried, *left])
        study = optuna.create_study(sampler=_sampler(self._seed + len(tried)))
        for candidate, time in tried.items():
            study.add_trial(_finished(candidate, time, axes))
        by_params = {canonical(dict(candidate.config)): candidate for candidate in left}
        found: dict[Candidate, None] = {}
        for _ in range(DRAWS * wanted):
            match = by_params.get(canonical(study.ask(axes).params))
            if match is not None:
                found[match] = None
            if len(found) == wanted:
                break
        return list(found)

    def _study(self, name: str) -> optuna.Study:
        if name not in self._studies:
            self._studies[name] = optuna.create_study(
                storage=self._storage, study_name=name, load_if_exists=True
            )
        return self._studies[name]

    def _name_and_axes(
        self, candidate: StepCandidate, configs: Sequence[Candidate]
    ) -> tuple[str, Axes]:
        """A study accepts one set of values for each axis, so its name changes with them."""
        if candidate.cluster not in self._named:
            axes = _axes(sorted(configs, key=repr))
            values = {name: str(axis) for name, axis in axes.items()}
            rounding = precisions_of(candidate.step, self._arch)
            key = digest([candidate.cluster, values, self._scope, *rounding])[:16]
            op = heaviest_node(candidate.step).op
            name = f"{candidate.candidate.family} {op} {key}"
            self._named[candidate.cluster] = name, axes
        return self._named[candidate.cluster]

    def _give_up(self, error: Exception) -> None:
        why = without_secrets(str(error), self._url)
        warn(f"Optuna's storage failed, trials stay in memory: {why}")
        self._storage = optuna.storages.InMemoryStorage()
        self._earlier.clear()
        self._studies.clear()


def _brief(outcome: Outcome) -> Any:
    if isinstance(outcome, Rejected):
        outcome = replace(outcome, reason=outcome.reason[:REASON_LENGTH])
    return to_json(outcome)


def _known(
    trials: Sequence[optuna.trial.FrozenTrial], family: str
) -> Iterator[tuple[Key, Outcome]]:
    """What the trials say of candidates; noise says something of the machine alone."""
    for trial in trials:
        with suppress(LookupError, TypeError, ValueError):  # a trial that plantune did not write
            outcome: Outcome = from_json(Outcome, trial.user_attrs[OUTCOME])
            if not is_noisy(outcome):
                candidate = Candidate(family, Attrs(trial.params))
                yield (trial.user_attrs[STEP], candidate), outcome


def _sampler(seed: int) -> optuna.samplers.TPESampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna calls some of these options experimental
        return optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=0, multivariate=True, constant_liar=True
        )


def _axes(candidates: Sequence[Candidate]) -> Axes:
    """Each axis of the configs with the values that occur."""
    values: dict[str, dict[Any, None]] = {}
    for candidate in candidates:
        for name, value in candidate.config.items():
            values.setdefault(name, {})[value] = None
    categorical = optuna.distributions.CategoricalDistribution
    return {name: categorical(tuple(found)) for name, found in values.items()}


def _finished(
    candidate: Candidate,
    time: float | None,
    axes: Axes,
    attributes: Mapping[str, Any] | None = None,
) -> optuna.trial.FrozenTrial:
    """A trial with a time, or a failed one: never a large number for a failure."""
    return optuna.trial.create_trial(
        params={name: candidate.config[name] for name in axes},
        distributions=axes,
        value=time,
        state=optuna.trial.TrialState.FAIL if time is None else optuna.trial.TrialState.COMPLETE,
        user_attrs=dict(attributes or {}),
    )
