"""The last judgement of a plan: against the framework's best ways to run the network, in turns."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plantune.device import device_for, first_line
from plantune.env import NO_COMPILER, cxx_compiler
from plantune.errors import BuildError, PlantuneError, WorkerDied, WrongResult
from plantune.graph.types import DTYPES, TensorType
from plantune.measure.gpu_watch import call_watch
from plantune.measure.limits import GPU_FAULTS
from plantune.measure.numerics import TOLERANCES
from plantune.measure.timing import (
    Call,
    Effort,
    Interval,
    Timing,
    ratio_interval,
    time_interleaved,
)
from plantune.measure.whole import NO_TIME
from plantune.models.registry import network
from plantune.plan import Plan
from plantune.problem import Problem
from plantune.runtime.module import TunedModule
from plantune.space.arch import load_arch

PLANTUNE = "plantune"
# torch.compile records its graphs in the second and third call.
FIRST_CALLS = 3
Say = Callable[[str], None]


@dataclass(frozen=True)
class Race:
    """Who ran, how fast, and why others did not.

    `ratio` is the plan's median by that of the best baseline; None where one of the two is missing.
    `peaks_mib` is what each way on a GPU takes of its memory in a call, its weights included.
    """

    timings: Mapping[str, Timing]
    failures: Mapping[str, str]
    best_baseline: str | None
    ratio: Interval | None
    peaks_mib: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "timings": [[name, timing.to_json()] for name, timing in self.timings.items()],
            "failures": dict(self.failures),
            "best_baseline": self.best_baseline,
            "ratio": None if self.ratio is None else asdict(self.ratio),
            "peaks_mib": dict(self.peaks_mib),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Race:
        timings = {name: Timing.from_json(item) for name, item in data["timings"]}
        ratio = None if data["ratio"] is None else Interval(**data["ratio"])
        return Race(timings, data["failures"], data["best_baseline"], ratio, data["peaks_mib"])


Make = Callable[[nn.Module, Tensor], Any]


@dataclass(frozen=True)
class Baseline:
    """One of the framework's ways: what it makes of a module, and in which layout of images.

    With `benchmark` cuDNN times its algorithms and takes the best. With `captured` whole calls are
    replayed from a graph, on the memory of the first: a caller would have to copy images there.
    What `compiles` C++ is not tried without a compiler.
    """

    make: Make
    channels_last: bool = False
    benchmark: bool = False
    captured: bool = False
    compiles: bool = False


def _as_it_is(module: nn.Module, x: Tensor) -> Any:
    return module


def _torchscript(module: nn.Module, x: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit says that it is deprecated
        traced = torch.jit.trace(module, x, check_trace=False)
        return traced if module.training else torch.jit.freeze(traced)


def _frozen(module: nn.Module, x: Tensor) -> Any:
    return torch.compile(module, options=None if module.training else {"freezing": True})


def _compiled(mode: str) -> Make:
    return lambda module, x: torch.compile(module, mode=mode)


EAGER = Baseline(_as_it_is)
# The strongest way of each kind that is known, by the kind of arch.
BASELINES: Mapping[str, Mapping[str, Baseline]] = {
    "cpu": {
        "eager": EAGER,
        "eager-channels-last": Baseline(_as_it_is, channels_last=True),
        "torchscript": Baseline(_torchscript),
        "compile-default": Baseline(_frozen, compiles=True),
    },
    "cuda": {
        "eager": EAGER,
        "eager-channels-last": Baseline(_as_it_is, channels_last=True, benchmark=True),
        "torchscript": Baseline(_torchscript),
        "cuda-graph": Baseline(_as_it_is, channels_last=True, benchmark=True, captured=True),
        "compile-default": Baseline(_compiled("default"), channels_last=True, benchmark=True),
        "compile-reduce-overhead": Baseline(_compiled("reduce-overhead"), channels_last=True),
        "compile-max-autotune": Baseline(_compiled("max-autotune"), channels_last=True),
    },
}


def baselines_for(arch: str) -> tuple[str, ...]:
    """The names of the framework's ways on an arch."""
    return tuple(BASELINES[load_arch(arch).kind])


class _Runners:
    """The ways to run one network, on the same weights and input, each proved before it runs."""

    def __init__(self, problem: Problem, seed: int) -> None:
        torch.manual_seed(seed)
        spec, dtype = network(problem.network), DTYPES[problem.dtype]
        self.shape = spec.input_shape(problem.batch, problem.in_channels)
        self.problem = problem
        self._train = problem.mode == "train"
        arch = load_arch(problem.arch)
        self._baselines, self.device = BASELINES[arch.kind], device_for(arch)
        module = spec.build(problem.in_channels).train(self._train)
        self._module = _randomised(module).to(self.device.place, dtype)
        self._x = torch.randn(self.shape, dtype=dtype).to(self.device.place)
        self._exact = self._output(copy.deepcopy(self._module).double(), self._x.double())
        eager = self._output(copy.deepcopy(self._module), self._x)
        self._bound = 2 * self._error(eager) + 4 * TOLERANCES[problem.dtype]
        self._dy = torch.randn(eager.shape, dtype=dtype).to(self.device.place)

    def plan(self, plan: Plan) -> Call:
        """The plan as a user runs it; raises WrongResult where its output is not the network's."""
        tuned = TunedModule(
            copy.deepcopy(self._module),
            TensorType(self.shape, self.problem.dtype),
            name=self.problem.network,
            mode=self.problem.mode,
            plan=plan,
            fallback="error",
        )
        return self._proved(tuned, PLANTUNE, self._x)

    def is_captured(self, name: str) -> bool:
        """Such ways are made last: while torch.compile records its own graphs it gives back the
        workspaces of cuBLAS, and theirs would be among them.
        """
        return self._baselines[name].captured

    def baseline(self, name: str) -> Call:
        """One of the framework's ways; raises whatever the framework does where it fails."""
        way = self._baselines[name]
        if way.compiles and cxx_compiler() is None:
            raise BuildError(NO_COMPILER)
        module, x = copy.deepcopy(self._module), self._x
        if way.channels_last:
            module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.set_grad_enabled(self._train), _benchmarking(way.benchmark):
            call = self._proved(way.make(module, x), name, x)
            if way.captured:
                return self._captured(call)
        return _benchmarked(call) if way.benchmark else call

    @contextmanager
    def memory_of(
        self, name: str, calls: Mapping[str, Call], peaks: dict[str, float]
    ) -> Iterator[None]:
        """Notes the memory of the way that is made inside."""
        held = self.device.held_bytes()
        yield
        peak = self.device.peak_bytes(calls[name])
        # What a way gives back of others', such as cuBLAS's workspace, may be more than it takes.
        if held is not None and peak is not None and peak >= held:
            peaks[name] = (peak - held) / 2**20

    def _captured(self, call: Call) -> Call:
        with self.device.own_stream():
            call()
            return self.device.captured(call)

    def _proved(self, module: Any, name: str, x: Tensor) -> Call:
        error = self._error(self._output(module, x))
        if not error <= self._bound:
            text = f"{name} gives another output for {self.problem}: relative error {error:.3g}"
            raise WrongResult(f"{text}, allowed {self._bound:.3g}", error, self._bound)
        parameters = [p for p in module.parameters() if p.requires_grad]

        def infer() -> None:
            with torch.no_grad():
                module(x)

        # Between two passes an optimizer changes the weights: preparing from them is in the time.
        tuned = isinstance(module, TunedModule)
        renew = partial(module.refresh, weights_only=True) if tuned else list

        def train() -> None:
            renew()
            for parameter in parameters:
                parameter.grad = None
            module(x).backward(self._dy)

        call = train if self._train else infer
        for _ in range(FIRST_CALLS if self.device.captures else 1):
            call()  # What is compiled or captured in the first passes counts as building.
        return call

    def _output(self, module: Any, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self._train):
            output: Tensor = module(x)
        return output.detach()

    def _error(self, output: Tensor) -> float:
        return float((output.double() - self._exact).norm() / self._exact.norm())


def race(
    problem: Problem,
    plan: Plan | None,
    baselines: Sequence[str],
    effort: Effort,
    seed: int,
    say: Say,
) -> Race:
    """Times the plan and the named baselines in turns; a baseline that fails says why, and so does
    one whose turn comes after the effort's `until`.

    Raises WrongResult where the plan's output is not the network's.
    """
    say("build")
    runners = _Runners(problem, seed)
    calls: dict[str, Call] = {}
    peaks: dict[str, float] = {}
    if plan is not None:
        with _blaming(PLANTUNE), runners.memory_of(PLANTUNE, calls, peaks):
            calls[PLANTUNE] = runners.plan(plan)
            runners.device.give_back_memory()  # as eager's algorithms do when they are compared
    failures: dict[str, str] = {}
    for name in sorted(baselines, key=runners.is_captured):
        if len(calls) > 1 and effort.is_over:
            failures[name] = NO_TIME
            continue
        say("build")
        try:
            with runners.memory_of(name, calls, peaks):
                calls[name] = runners.baseline(name)
        except Exception as error:  # It may fail in any way that torch knows.
            if not runners.device.works():
                raise WorkerDied(f"{name}: {first_line(error)}") from error
            calls.pop(name, None)  # it may have failed behind its first calls
            failures[name] = _reason(error)
    say("time")
    watch = call_watch(runners.device)
    with _blaming(" and ".join(calls)):
        timed = time_interleaved(list(calls.values()), effort, watch) if calls else []
    return _judged(dict(zip(calls, timed, strict=True)), failures, peaks, seed)


def _reason(error: Exception) -> str:
    """In one line: what torch's compiler says goes on for pages."""
    if isinstance(error, PlantuneError):
        return str(error)
    return f"{type(error).__name__}: {first_line(error)}"[:1000]


@contextmanager
def _blaming(name: str) -> Iterator[None]:
    """What a GPU says of a fault names no kernel."""
    try:
        yield
    except GPU_FAULTS as error:
        raise WorkerDied(f"{name}: {first_line(error)}") from error


@contextmanager
def _benchmarking(wanted: bool) -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = wanted
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _benchmarked(call: Call) -> Call:
    """The call as in a process where cuDNN times its algorithms; the others are not."""

    def run() -> None:
        torch.backends.cudnn.benchmark = True
        call()
        torch.backends.cudnn.benchmark = False

    return run


def _judged(
    timings: dict[str, Timing], failures: dict[str, str], peaks: dict[str, float], seed: int
) -> Race:
    others = [name for name in timings if name != PLANTUNE]
    best = min(others, key=lambda name: timings[name].median_us, default=None)
    ratio = None
    if best is not None and PLANTUNE in timings:
        ratio = ratio_interval(timings[PLANTUNE], timings[best], seed)
    return Race(timings, failures, best, ratio, peaks)


def _randomised(module: nn.Module) -> nn.Module:
    """No weight is 0 or 1 any more: Fixup's first values would hide a mistake."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.uniform_(0.5, 1.0)
    return module
