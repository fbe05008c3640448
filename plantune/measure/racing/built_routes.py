"""Routes made ready for a race: on the same weights and images, each proved first."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plantune.base.distance import Exact
from plantune.base.scopes import with_values
from plantune.base.tolerances import AGAIN, tolerance
from plantune.devices.cuda.flags import cudnn
from plantune.devices.cuda.workspaces import KeptProducts
from plantune.devices.device import Runnable, framework_alone
from plantune.devices.gpus import device_for
from plantune.devices.host import NO_COMPILER, cxx_compiler
from plantune.errors import BuildError, WrongResult
from plantune.measure.racing.routes import FROZEN, LIVE, ROUTES, Run
from plantune.measure.racing.training_calls import (
    CallOf,
    Marked,
    passes_of,
    steps_of,
    steps_of_plan,
)
from plantune.measure.subject import Inputs, Raced, Subject
from plantune.plans.plan import PROGRAM, Plan
from plantune.plans.written_words import MEASURED
from plantune.runtime.module import TunedModule
from plantune.runtime.proof.roundings import eager_again
from plantune.runtime.watched.copies import copied
from plantune.space.arch import load_arch

PLANTUNE, PLANTUNE_FROZEN = "plantune", "plantune-frozen"
# torch.compile records its graphs in the second and third call, TorchScript compiles in the second.
FIRST_CALLS = 3
# Images that differ from call to call, in each of two layouts; fewer if they are large.
MOST_IMAGES = 64
IMAGES_BYTES = 1 << 30


@dataclass(frozen=True)
class BuiltRoute:
    """A route made ready to be timed: on the same images each time, and on others in each call.

    `build_s` is the time until its first calls were done; `cached` says that torch found something
    of it compiled. `static` says that `same` relies on images that stay where they are. `marked`
    tells of the parts of a call in training; None where they cannot be told apart.
    """

    same: Runnable
    fresh: Runnable
    promise: str
    build_s: float
    cached: bool = False
    static: bool = False
    marked: Marked | None = None


class RouteBuilder:
    """Makes the routes of one race. At most so many inputs take turns, two at least.

    Routes that stand in for the plan `deployed` race as the users of its tuned module would call
    them, with all that is checked before. Beside a policy of 24 us that is seen.
    """

    def __init__(
        self,
        raced: Raced,
        seed: int,
        most_images: int = MOST_IMAGES,
        deployed: Plan | None = None,
    ) -> None:
        torch.manual_seed(seed)
        problem = self.problem = raced.problem
        self.peaks_mib: dict[str, float] = {}
        self._pool_is_there = False
        self._tuned: TunedModule | None = None
        self._deployed = None if problem.mode == "train" else deployed
        self._train, self._steps = problem.mode == "train", raced.steps
        arch = load_arch(problem.arch)
        self._routes, self.device = ROUTES[arch.kind], device_for(arch)
        self._subject = Subject(raced, self.device.place)
        self._module = self._subject.module
        count = images_that_fit(sum(t.size_bytes for t in self._subject.types), most_images)
        random = self.device.generator(seed)  # large batches take a CPU many seconds
        self._images = [self._subject.inputs(random) for _ in range(count)]
        # Made before memory is measured: the first way to use them would count them as its own.
        self._images_last: list[Inputs] = [tuple(map(_channels_last, xs)) for xs in self._images]
        with framework_alone():
            self._exact = self._exactly(self._images[:2])
            # cuDNN remembers the first algorithm of each shape, also one that it did not time.
            with with_values(cudnn, benchmark=True):
                eager = self._outputs(copied(self._module), self._images[0])
        # What draws random numbers gives others each time.
        self._slack = math.inf if self._subject.draws else tolerance("race", problem.dtype)
        self._bound = 2 * _worst(self._exact[0], eager) + self._slack
        self._seed = seed
        self._dys = [torch.randn_like(y) for y in eager if y.is_floating_point()]

    @property
    def in_turns(self) -> int:
        """How many images or batches of them take turns."""
        return len(self._images)

    def plan(self, plan: Plan, *, frozen: bool = False) -> BuiltRoute:
        """The plan as a user runs it; raises WrongResult if its output is not the network's."""
        start = time.perf_counter()
        module, tuned = self._tuned_by(plan, frozen=frozen)
        self._tuned = tuned
        name, promise = (PLANTUNE_FROZEN, FROZEN) if frozen else (PLANTUNE, LIVE)
        # Between two passes an optimizer changes the weights: preparing from them is in the time.
        if self._steps:
            call_of = steps_of_plan(tuned, self._dys)
        else:
            call_of = self._calls_of(tuned, module, lambda: tuned.refresh(weights_only=True))
        return self._ready(name, tuned, self._images, call_of, promise, start)

    def _tuned_by(self, plan: Plan, *, frozen: bool) -> tuple[nn.Module, TunedModule]:
        """A tuned module, and its module as load_model builds it."""
        module, _ = self._laid_out(channels_last=self.device.captures)
        tuned = TunedModule(
            module,
            self._subject.arguments,
            name=self.problem.network,
            mode=self.problem.mode,
            plan=plan,
            fallback="error",
            frozen=frozen,
        )
        return module, tuned

    def between_plans(self) -> float | None:
        """How far apart the outputs are that the plans for training and for inference compute, as a
        part of the largest one; None if there is nothing to compare.
        """
        tuned = self._tuned
        if not self._train or tuned is None or self._subject.draws:
            return None
        with torch.no_grad():
            inferred = _tensors(tuned(*self._images[0]))
        trained = self._outputs(tuned, self._images[0])
        pairs = [(a, b) for a, b in zip(inferred, trained, strict=True) if a.is_floating_point()]
        return max(
            (float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs),
            default=0.0,
        )

    def is_captured(self, name: str) -> bool:
        """Such routes are made last: while torch.compile records its own graphs it gives back the
        workspaces of cuBLAS, and theirs would be among them.
        """
        return self._routes[name].captured

    def framework_route(self, name: str) -> BuiltRoute:
        """One of the framework's routes; raises whatever the framework raises."""
        route = self._routes[name]
        if route.compiles and cxx_compiler() is None:
            raise BuildError(NO_COMPILER)
        start, hits = time.perf_counter(), _cache_hits()
        module, images = self._laid_out(route.channels_last)
        run: Run
        if route.stands_in and self._deployed is not None:
            run, images = self._standing_in(name, self._deployed), self._images
        else:
            run = route.make(module, *images[0])
        call_of = self._calls_of(run, module)
        built = self._ready(name, run, images, call_of, route.promise(self.problem.mode), start)
        if route.captured:
            built = self._captured(built, call_of, images)
        return replace(built, cached=_cache_hits() > hits)

    def _standing_in(self, name: str, plan: Plan) -> TunedModule:
        """The route as it runs where it won; raises ValueError if eager would run in its place."""
        frozen = self._routes[name].frozen
        # Of a plan that was not measured calls would find the route themselves.
        plan = replace(plan, origin=MEASURED, route=PROGRAM if frozen else name)
        plan = replace(plan, frozen_route=name if frozen else None)
        _, tuned = self._tuned_by(plan, frozen=frozen)
        self._outputs(tuned, self._images[0])
        why_not = tuned.why_eager()
        if why_not is not None:
            raise ValueError(why_not)
        return tuned

    def with_static_images(self, name: str, built: BuiltRoute) -> BuiltRoute:
        """The route with a second make of it, which knows that its images stay at one address.

        It counts only if what it computes is right for what is written there later.
        """
        route = self._routes[name]
        if self._train or not (route.static and self.device.captures):
            return built
        module, images = self._laid_out(route.channels_last)
        image = _copied(images[0])
        for x in image:
            torch._dynamo.mark_static_address(x, guard=False)
        run = route.make(module, *image)
        if not self._is_right(self._error(run, images, image)):
            return built
        same = _warmed_up(self._calls_of(run, module)([image]))
        return replace(built, same=same, static=True)

    def weighed(self, name: str, make: Callable[[], BuiltRoute]) -> BuiltRoute:
        """A route as it is made; notes how much memory it takes."""
        before = self.device.held_bytes()
        made = make()
        peak = self.device.peak_bytes(made.same)
        # What a route gives back of others', such as cuBLAS's workspace, may be more than it takes.
        if (
            before is not None
            and peak is not None
            and peak >= before
            and not self._finds_a_pool(name)
        ):
            self.peaks_mib[name] = (peak - before) / 2**20
        return made

    def _finds_a_pool(self, name: str) -> bool:
        """Whether memory of another route is there for it to use: torch.compile's own graphs share
        one pool, so that after max-autotune's 1,097 MiB reduce-overhead's took 21 (H200).
        """
        route = self._routes.get(name)
        if route is None or not route.pooled:
            return False
        found, self._pool_is_there = self._pool_is_there, True
        return found

    def _exactly(self, images: Sequence[Inputs]) -> list[list[Exact]]:
        """The outputs in float64, for each of the images."""
        exact = self._subject.exact()
        wide = [tuple(x.double() if x.is_floating_point() else x for x in xs) for xs in images]
        return [[Exact(y) for y in self._outputs(exact, xs)] for xs in wide]

    def _laid_out(self, channels_last: bool) -> tuple[nn.Module, Sequence[Inputs]]:
        module = copied(self._module)
        if not channels_last:
            return module, self._images
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return module, self._images_last

    def _ready(
        self,
        name: str,
        run: Run,
        images: Sequence[Inputs],
        call_of: CallOf,
        promise: str,
        start: float,
    ) -> BuiltRoute:
        """Proves the outputs first. The first calls count as building."""
        error = self._error(run, images)
        if not self._is_right(error):
            text = f"{name} gives another output for {self.problem}: relative error {error:.3g}"
            raise WrongResult(f"{text}, allowed {self._bound:.3g}", error, self._bound)
        same = call_of(images[:1])
        _warmed_up(same)
        self.device.synchronize()
        build_s, marked = time.perf_counter() - start, same if self._train else None
        return BuiltRoute(same, call_of(images), promise, build_s, marked=marked)

    def _is_right(self, error: float) -> bool:
        return error <= self._bound or (math.isfinite(error) and error <= self._wider_bound)

    @cached_property
    def _wider_bound(self) -> float:
        """By eager's largest error on all images that are compared, in both layouts and after other
        roundings: made where the first bound refuses.
        """
        worst, random = 0.0, self.device.generator(self._seed + 1)
        for images, exact in zip(self._images, self._exact, strict=False):
            for module, xs in eager_again(self._module, images, random, AGAIN):
                error = _worst(exact, self._outputs(module, xs))
                worst = max(worst, error if math.isfinite(error) else 0.0)
        self._bound = max(self._bound, 2 * worst + self._slack)
        return self._bound

    def _captured(
        self,
        built: BuiltRoute,
        call_of: CallOf,
        images: Sequence[Inputs],
    ) -> BuiltRoute:
        image = _copied(images[0])
        call, others = call_of([image]), cycle(images)
        with self.device.own_stream():
            with KeptProducts():  # other routes give cuBLAS's workspaces back
                call()
            replay = self.device.captured(call)

        def fresh() -> None:
            _copy_into(image, next(others))
            replay()

        return replace(built, same=replay, fresh=fresh, marked=None)

    def _calls_of(self, run: Run, module: nn.Module, renew: Callable[[], object] = list) -> CallOf:
        """Makes a call whose images take turns. It needs gradients on in training, else off."""
        if self._steps:
            return steps_of(run, module, self._dys)
        if self._train:
            return passes_of(run, module, self._dys, renew)

        def call_of(images: Sequence[Inputs]) -> Runnable:
            turns = cycle(images)
            return lambda: run(*next(turns))

        return call_of

    def _error(self, run: Run, images: Sequence[Inputs], into: Inputs | None = None) -> float:
        """The largest one for two images: what takes an image for a constant is found out. Each is
        run twice: graphs are recorded in the second call, and replayed in later ones.
        """
        errors = []
        for image, exact in 2 * list(zip(images, self._exact, strict=False)):
            xs = image if into is None else _copy_into(into, image)
            errors.append(_worst(exact, self._outputs(run, xs)))
        return max(errors)

    def _outputs(self, run: Run, xs: Inputs) -> list[Tensor]:
        with torch.set_grad_enabled(self._train):
            return [y.detach() for y in _tensors(run(*xs))]


def _warmed_up(call: Runnable) -> Runnable:
    """A call of which torch has compiled and captured all by now."""
    for _ in range(FIRST_CALLS):
        call()
    return call


def images_that_fit(image_bytes: int, most: int) -> int:
    """How many inputs, in two layouts each; two at least, with which routes are proved."""
    return max(2, min(most, IMAGES_BYTES // (2 * image_bytes)))


def _tensors(made: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]


def _worst(exact: Sequence[Exact], results: Sequence[Tensor]) -> float:
    """The largest error of all outputs. NaN is never the largest for Python, so it is infinite."""
    errors = [e.errors(result)[0] for e, result in zip(exact, results, strict=True)]
    return max(math.inf if math.isnan(error) else error for error in errors)


def _copied(xs: Inputs) -> Inputs:
    return tuple(x.clone(memory_format=torch.preserve_format) for x in xs)


def _copy_into(xs: Inputs, others: Inputs) -> Inputs:
    for x, other in zip(xs, others, strict=True):
        x.copy_(other)
    return xs


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def _cache_hits() -> int:
    """How often torch has found a graph compiled already."""
    from torch._dynamo.utils import counters

    found: Any = counters["inductor"]["fxgraph_cache_hit"]
    return int(found)
