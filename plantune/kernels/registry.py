"""Finds the kernel families: every module below `plantune.kernels.families` defines one.

A user's own kernels are searched like these: PLANTUNE_FAMILIES names modules that define a FAMILY,
and an installed package names such objects as entry points of the group `plantune.families`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from importlib.metadata import entry_points

from plantune.base.environment_variables import extra_families
from plantune.base.nearest import hint
from plantune.base.warning import warn
from plantune.devices.cuda.flags import float32_precisions
from plantune.devices.host import NO_COMPILER
from plantune.errors import IllegalCandidate, PlantuneError
from plantune.graph import Step
from plantune.kernels import families
from plantune.kernels.family import AnyFamily, Candidate
from plantune.kernels.resolved import ResolvedStep
from plantune.space import Arch, SearchSpace

ENTRY_POINTS = "plantune.families"
# How many families' candidates of a step are remembered.
MOST_KEPT = 4096


@cache
def all_families() -> Mapping[str, AnyFamily]:
    """plantune's families by name, in the order of their files, then those of PLANTUNE_FAMILIES."""
    found = pkgutil.walk_packages(families.__path__, f"{families.__name__}.")
    own = sorted((item.name for item in found if not item.ispkg), key=_file)
    built_in = [importlib.import_module(name).FAMILY for name in own]
    return {family.name: family for family in (*built_in, *map(_of_users, extra_families()))}


def _of_users(name: str) -> AnyFamily:
    try:
        family: AnyFamily = importlib.import_module(name).FAMILY
    except Exception as error:
        raise PlantuneError(
            f"PLANTUNE_FAMILIES names the module {name!r}, which gives no FAMILY: "
            f"{type(error).__name__}: {error}. Python looks for it in PYTHONPATH"
        ) from error
    return family


@cache
def installed_families() -> Mapping[str, AnyFamily]:
    """The families of other installed packages. To look for them takes 20 ms, so that is left to
    searches, and to plans that have one.
    """
    found = {}
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            family = entry.load()
        except (ImportError, AttributeError) as error:
            package = entry.dist.name if entry.dist else "a package"
            warn(
                f"{package}: its kernel family {entry.value!r} cannot be imported and is left out: "
                f"{error}",
            )
        else:
            found[family.name] = family
    return found


def _file(module: str) -> str:
    """The sort key of families: moving one to another folder changes no search."""
    return module.rpartition(".")[2]


def family_named(name: str) -> AnyFamily:
    """The family of that name; raises IllegalCandidate naming the known ones."""
    known = all_families()
    if name not in known:
        known = {**known, **installed_families()}
    if name not in known:
        told = f"{', '.join(known)}{hint(name, known)}"
        raise IllegalCandidate(f"no kernel family is called {name!r}; known: {told}")
    return known[name]


def is_family(name: str) -> bool:
    """Whether a family of that name is here."""
    return name in all_families() or name in installed_families()


def need_a_compiler(arch: Arch) -> tuple[str, ...]:
    """The families of an arch that are left out because no C++ compiler was found."""
    reasons = {name: family.why_not_arch(arch) for name, family in all_families().items()}
    return tuple(name for name, reason in reasons.items() if reason == NO_COMPILER)


def resolve(step: Step, candidate: Candidate) -> ResolvedStep:
    """What runs a step; raises IllegalCandidate where nothing of the family can."""
    family = family_named(candidate.family)
    return ResolvedStep(step, candidate, family, family.parts(step))


def legal_or_why_not(step: Step, candidate: Candidate, space: SearchSpace) -> ResolvedStep | str:
    """What runs a step on the search space's arch, or why the candidate cannot."""
    try:
        family = family_named(candidate.family)
        if not family.admits(candidate.config, space):
            return f"{dict(candidate.config)} is not in the search space of {space.arch.name}"
        if (reason := family.why_not_arch(space.arch)) is not None:
            return reason
        made = ResolvedStep(step, candidate, family, family.parts(step))
    except IllegalCandidate as error:
        return str(error)
    return family.why_not_config(made.parts, candidate.config, space.arch) or made


def why_not(step: Step, candidate: Candidate, space: SearchSpace) -> str | None:
    """Why a candidate cannot run a step on the search space's arch, or None if it can."""
    found = legal_or_why_not(step, candidate, space)
    return found if isinstance(found, str) else None


def resolve_legal(step: Step, candidate: Candidate, space: SearchSpace) -> ResolvedStep:
    """What runs a step; raises IllegalCandidate if the candidate cannot."""
    found = legal_or_why_not(step, candidate, space)
    if isinstance(found, str):
        raise IllegalCandidate(f"{candidate.family} at step {step.name!r}: {found}")
    return found


def candidates(
    step: Step, space: SearchSpace, names: Iterable[str] | None = None
) -> tuple[Candidate, ...]:
    """Every legal candidate of a step, in the order of families and search space; of the named
    families alone if any are named. A name of a removed family has none.
    """
    every = {**installed_families(), **all_families()} if names is None else {}
    asked = every.values() if names is None else map(family_named, filter(is_family, names))
    return tuple(
        candidate
        for family in asked
        if family.why_not_arch(space.arch) is None and family.why_not_step(step) is None
        for candidate in _of_family(family, step, space)
    )


def _of_family(family: AnyFamily, step: Step, space: SearchSpace) -> tuple[Candidate, ...]:
    if space.arch.kind == "cpu":  # whether C++ can be compiled or loaded may change
        return _legal(family, step, space)
    return _remembered(family, _Alike(step, space))


def _legal(family: AnyFamily, step: Step, space: SearchSpace) -> tuple[Candidate, ...]:
    parts = family.parts(step)
    return tuple(
        Candidate(family.name, config)
        for config in family.configs_for(parts, space)
        if family.why_not_config(parts, config, space.arch) is None
    )


class _Alike:
    """A step, a search space and torch's precision, equal to others of which the same candidates
    are legal.
    """

    def __init__(self, step: Step, space: SearchSpace) -> None:
        self.step, self.space = step, space
        self._key = (step.signature, space.digest, float32_precisions())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Alike) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@lru_cache(maxsize=MOST_KEPT)
def _remembered(family: AnyFamily, alike: _Alike) -> tuple[Candidate, ...]:
    """A guess, a plan by hand and a search ask for those of the same steps."""
    return _legal(family, alike.step, alike.space)


def can_be_guessed(step: Step, candidate: Candidate) -> bool:
    """Whether a plan may use a candidate that nothing has measured."""
    chosen = resolve(step, candidate)
    return chosen.family.can_be_guessed(chosen.parts, chosen.config)


def estimate_us(step: Step, candidate: Candidate, arch: Arch | None = None) -> float:
    """A guess at the time of one launch, on the chip of `arch`, else on the measured one."""
    return resolve(step, candidate).estimate_us(arch)
