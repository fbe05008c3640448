"""What every CUDA family promises, on the steps that its own test states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, ClassVar

import pytest

from plantune.base.canonical import Attrs
from plantune.devices.cuda.build import Usage
from plantune.graph.step import Step
from plantune.kernels.cuda.cuda_family import CudaFamily
from plantune.kernels.family import Candidate
from plantune.kernels.registry import why_not
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

from ..conftest import step_of
from .conftest import DTYPES, in_turns, legal

KERNELS = frozenset({"run", "run_unaligned"})
# Tests, and what has to be stated for them.
PROMISES = {
    "test_it_runs_every_step": "steps",
    "test_it_is_right": "steps",
    "test_what_is_to_run_is_legal": "chosen",
    "test_what_is_chosen_is_right": "chosen",
    "test_other_steps_are_refused_with_the_reason": "refused",
    "test_a_config_fits_or_has_a_reason": "configs",
    "test_it_builds_within_its_limits": "builds",
    "test_what_is_chosen_builds_within_its_limits": "builds_chosen",
}


class Contract:
    """Tests of one family. A derived class `Test...` names it and states what it is tested on;
    a promise for which nothing is stated is not collected.

    Where a tuple ends before a dtype and an arch, these are float16 and `arch`.
    """

    family: ClassVar[CudaFamily]
    arch: ClassVar[str] = "sm90"
    dtypes: ClassVar[Sequence[str]] = DTYPES

    steps: ClassVar[Mapping[Any, Any]] = {}
    """By their names: some config runs each in every dtype; on a GPU they share all configs."""

    without_config: ClassVar[Set[Any]] = frozenset()
    """Names of those that are read, but that no config runs."""

    chosen: ClassVar[Mapping[str, tuple[Any, Attrs]]] = {}
    """By their names: steps, each with the config that runs it."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """A step and what its refusal says, in a dtype."""

    configs: ClassVar[Sequence[tuple[Any, ...]]] = ()
    """A step, a config and why it does not fit or None, in a dtype, on an arch."""

    builds: ClassVar[Sequence[str]] = ()
    """Names of steps that are built, for archs in turns."""

    config: ClassVar[Attrs | None] = None
    """What these are built with; the last legal config if there is none."""

    builds_chosen: ClassVar[Sequence[tuple[Any, ...]]] = ()
    """A step and a config, which is legal and built, in a dtype."""

    def __init_subclass__(cls) -> None:
        for promise, stated in PROMISES.items() if hasattr(cls, "family") else ():
            if not getattr(cls, stated):
                setattr(cls, promise, None)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        tables: dict[str, Sequence[Any]] = {
            "name": list(self.steps),
            "case": [name for name in self.steps if name not in self.without_config],
            "dtype": self.dtypes,
            "choice": list(self.chosen),
            "refusal": list(self.refused),
            "fit": range(len(self.configs)),
            "arch_name,built": list(self._builds()),
            "at": range(len(self.builds_chosen)),
        }
        for fixtures, values in tables.items():
            if set(fixtures.split(",")) <= set(metafunc.fixturenames):
                metafunc.parametrize(fixtures, values)

    def step(self, stated: Any, dtype: str = "float16") -> Step:
        """The step that a table states."""
        return step_of(stated, dtype)

    def configs_to_build(self, step: Step, arch: str) -> Sequence[Attrs]:
        return [self.config or legal(self.family, step, arch)[-1].config]

    def kernels(self, step: Step, config: Attrs) -> Set[str]:
        """Those that a binary has."""
        return KERNELS

    def check_usage(self, step: Step, config: Attrs, usage: Mapping[str, Usage]) -> None:
        assert set(usage) == self.kernels(step, config)

    def test_it_runs_every_step(self, name, dtype):
        step = self.step(self.steps[name], dtype)
        assert self.family.why_not_step(step) is None
        found = legal(self.family, step, self.arch)
        assert bool(found) == (name not in self.without_config)

    @pytest.mark.gpu
    def test_it_is_right(self, assert_case_right, case, dtype):
        assert_case_right(self.family, self.steps, case, dtype, self.dtypes, self.step)

    def test_what_is_to_run_is_legal(self, choice):
        stated, config = self.chosen[choice]
        assert self._why_not(self.step(stated), config) is None

    @pytest.mark.gpu
    def test_what_is_chosen_is_right(self, assert_right, choice, dtype):
        stated, config = self.chosen[choice]
        candidate = Candidate(self.family.name, config)
        assert_right(self.step(stated, dtype), candidate, load_search_space(self.arch))

    def test_other_steps_are_refused_with_the_reason(self, refusal):
        stated, reason, *dtype = self.refused[refusal]
        assert reason in (self.family.why_not_step(self.step(stated, *dtype)) or "")

    def test_a_config_fits_or_has_a_reason(self, fit):
        stated, config, reason, *more = self.configs[fit]
        dtype, arch = (*more, *("float16", self.arch)[len(more) :])
        parts = self.family.parts(self.step(stated, dtype))
        found = self.family.why_not_config(parts, config, load_arch(arch))
        assert found is None if reason is None else reason in (found or "")

    def test_it_builds_within_its_limits(self, build_within_limits, arch_name, built):
        step = self.step(self.steps[built])
        for config in self.configs_to_build(step, arch_name):
            usage = build_within_limits(self.family, step, config, load_arch(arch_name))
            self.check_usage(step, config, usage)

    def test_what_is_chosen_builds_within_its_limits(self, build_within_limits, at):
        stated, config, *dtype = self.builds_chosen[at]
        step = self.step(stated, *dtype)
        assert self._why_not(step, config) is None
        usage = build_within_limits(self.family, step, config, load_arch(self.arch))
        self.check_usage(step, config, usage)

    def _why_not(self, step: Step, config: Attrs) -> str | None:
        candidate = Candidate(self.family.name, config)
        return why_not(step, candidate, load_search_space(self.arch))

    def _builds(self) -> Iterator[Any]:
        """Those that the family offers for an arch."""
        for case in in_turns(self.builds) if self.builds else ():
            if self.family.why_not_arch(load_arch(case.values[0])) is None:
                yield case


class AnyGpu(Contract):
    """Of families on CUTLASS: what is chosen is legal on an A100, and runs on any GPU."""

    arch, dtypes = "sm80", DTYPES[:2]

    @pytest.mark.gpu
    def test_what_is_chosen_is_right(self, assert_right, gpu_space, choice, dtype):
        stated, config = self.chosen[choice]
        assert_right(self.step(stated, dtype), Candidate(self.family.name, config), gpu_space)
