"""The last judgement of a plan: against the framework's best ways to run the network, in turns."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plantune.errors import WrongResult
from plantune.graph.types import DTYPES, TensorType
from plantune.measure.numerics import TOLERANCES
from plantune.measure.timing import (
    Call,
    Effort,
    Interval,
    Timing,
    ratio_interval,
    time_interleaved,
)
from plantune.models.registry import network
from plantune.plan import Plan
from plantune.runtime.module import TunedModule

PLANTUNE = "plantune"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Workload:
    """A reference network at one batch; in mode train a call is forward and backward."""

    network: str
    batch: int
    in_channels: int = 3
    mode: str = "infer"
    dtype: str = "float32"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Race:
    """Who ran, how fast, and why others did not.

    `ratio` is the plan's median by that of the best baseline; None where one of the two is missing.
    """

    timings: Mapping[str, Timing]
    failures: Mapping[str, str]
    best_baseline: str | None
    ratio: Interval | None

    def to_json(self) -> dict[str, Any]:
        return {
            "timings": [[name, timing.to_json()] for name, timing in self.timings.items()],
            "failures": dict(self.failures),
            "best_baseline": self.best_baseline,
            "ratio": None if self.ratio is None else asdict(self.ratio),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Race:
        timings = {name: Timing.from_json(item) for name, item in data["timings"]}
        ratio = None if data["ratio"] is None else Interval(**data["ratio"])
        return Race(timings, data["failures"], data["best_baseline"], ratio)


def _channels_last(module: nn.Module, x: Tensor) -> nn.Module:
    return module.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _torchscript(module: nn.Module, x: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit says that it is deprecated
        traced = torch.jit.trace(module, x, check_trace=False)
        return traced if module.training else torch.jit.freeze(traced)


def _compiled(module: nn.Module, x: Tensor) -> Any:
    return torch.compile(module, options=None if module.training else {"freezing": True})


BASELINES: Mapping[str, Callable[[nn.Module, Tensor], Any]] = {
    "eager": lambda module, x: module,
    "eager-channels-last": _channels_last,
    "torchscript": _torchscript,
    "compile-default": _compiled,
}


class _Runners:
    """The ways to run one network, on the same weights and input, each proved before it runs."""

    def __init__(self, workload: Workload, seed: int) -> None:
        torch.manual_seed(seed)
        spec, dtype = network(workload.network), DTYPES[workload.dtype]
        self.shape = spec.input_shape(workload.batch, workload.in_channels)
        self.workload = workload
        self._train = workload.mode == "train"
        module = spec.build(workload.in_channels).train(self._train)
        self._module = _randomised(module).to(dtype)
        self._x = torch.randn(self.shape, dtype=dtype)
        self._exact = self._output(copy.deepcopy(self._module).double(), self._x.double())
        eager = self._output(copy.deepcopy(self._module), self._x)
        self._bound = 2 * self._error(eager) + 4 * TOLERANCES[workload.dtype]
        self._dy = torch.randn(eager.shape, dtype=dtype)

    def plan(self, plan: Plan) -> Call:
        """The plan as a user runs it; raises WrongResult where its output is not the network's."""
        tuned = TunedModule(
            copy.deepcopy(self._module),
            TensorType(self.shape, self.workload.dtype),
            name=self.workload.network,
            mode=self.workload.mode,
            plan=plan,
            fallback="error",
        )
        return self._proved(tuned, PLANTUNE, self._x)

    def baseline(self, name: str) -> Call:
        """One of the framework's ways; raises whatever the framework does where it fails."""
        x = self._x
        if name == "eager-channels-last":
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.set_grad_enabled(self._train):
            return self._proved(BASELINES[name](copy.deepcopy(self._module), x), name, x)

    def _proved(self, module: Any, name: str, x: Tensor) -> Call:
        error = self._error(self._output(module, x))
        if not error <= self._bound:
            text = f"{name} gives another output for {self.workload}: relative error {error:.3g}"
            raise WrongResult(f"{text}, allowed {self._bound:.3g}", error, self._bound)
        parameters = [p for p in module.parameters() if p.requires_grad]

        def infer() -> None:
            with torch.no_grad():
                module(x)

        # Between two passes an optimizer changes the weights: preparing from them is in the time.
        renew = module.refresh if isinstance(module, TunedModule) else list

        def train() -> None:
            renew()
            for parameter in parameters:
                parameter.grad = None
            module(x).backward(self._dy)

        call = train if self._train else infer
        call()  # What is compiled at the first backward pass counts as building.
        return call

    def _output(self, module: Any, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self._train):
            output: Tensor = module(x)
        return output.detach()

    def _error(self, output: Tensor) -> float:
        return float((output.double() - self._exact).norm() / self._exact.norm())


def race(
    workload: Workload,
    plan: Plan | None,
    baselines: Sequence[str],
    effort: Effort,
    seed: int,
    say: Say,
) -> Race:
    """Times the plan and the named baselines in turns; a baseline that fails says why.

    Raises WrongResult where the plan's output is not the network's.
    """
    say("build")
    runners = _Runners(workload, seed)
    calls = {} if plan is None else {PLANTUNE: runners.plan(plan)}
    failures: dict[str, str] = {}
    for name in baselines:
        say("build")
        try:
            calls[name] = runners.baseline(name)
        except Exception as error:  # It may fail in any way that torch knows.
            failures[name] = f"{type(error).__name__}: {error}"[:1000]
    say("time")
    timed = time_interleaved(list(calls.values()), effort) if calls else []
    return _judged(dict(zip(calls, timed, strict=True)), failures, seed)


def _judged(timings: dict[str, Timing], failures: dict[str, str], seed: int) -> Race:
    others = [name for name in timings if name != PLANTUNE]
    best = min(others, key=lambda name: timings[name].median_us, default=None)
    ratio = None
    if best is not None and PLANTUNE in timings:
        ratio = ratio_interval(timings[PLANTUNE], timings[best], seed)
    return Race(timings, failures, best, ratio)


def _randomised(module: nn.Module) -> nn.Module:
    """No weight is 0 or 1 any more: Fixup's first values would hide a mistake."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.uniform_(0.5, 1.0)
    return module
