"""The framework's routes to run a network: each at its best, and what it promises of weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from plantune.measure.racing.inductor import prepare_workers
from plantune.plans.plan import EAGER
from plantune.runtime.calls.routes import ROUTE_FEATURES
from plantune.space.arch import load_arch

LIVE, FROZEN = "live", "frozen"
# The first arch on which a kernel may start before the one that it depends on has ended.
PDL_CAPABILITY = (9, 0)
BEST_OPTIONS = {
    "max_autotune": True,
    "coordinate_descent_tuning": True,
    "triton.cudagraphs": True,
}
Run = Callable[..., Any]
# Of a module and the inputs of a call.
Make = Callable[..., Run]


@dataclass(frozen=True)
class RouteSpec:
    """One of the framework's routes: how a module is prepared for it, and in which layout of
    images.

    A `frozen` route need not notice that weights change after it was made; none is so in training.
    With `captured` whole calls are replayed from a graph, into whose memory images are copied. What
    is `static` leaves out a copy of its own if it is told that an image stays at one address. What
    `compiles` C++ or Triton is not tried without a compiler. With `pooled` torch.compile records
    graphs of its own, which share one pool of memory. What `stands_in` runs in a tuned module
    where it wins, and races there.
    """

    make: Make
    channels_last: bool = False
    frozen: bool = False
    captured: bool = False
    static: bool = False
    compiles: bool = False
    pooled: bool = False
    stands_in: bool = False
    trains: bool = True

    def promise(self, mode: str) -> str:
        """Whether later changes of the weights count: "live" or "frozen"."""
        return FROZEN if self.frozen and mode == "infer" else LIVE


def _as_it_is(module: nn.Module, *inputs: Tensor) -> Run:
    return module


def _traced(module: nn.Module, *inputs: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit says that it is deprecated
        return torch.jit.trace(module, inputs, check_trace=False)


def _torchscript(module: nn.Module, *inputs: Tensor) -> Any:
    traced = _traced(module, *inputs)
    return traced if module.training else torch.jit.freeze(traced)


def _compiled(mode: str) -> Make:
    return lambda module, *inputs: torch.compile(_own_code(module), mode=mode, dynamic=False)


def _autotuned(module: nn.Module, *inputs: Tensor) -> Run:
    prepare_workers()
    return _compiled("max-autotune")(module, *inputs)


def _best(module: nn.Module, *inputs: Tensor) -> Run:
    """All that inductor can do, which no mode of it does."""
    place = inputs[0].device
    pdl = place.type == "cuda" and torch.cuda.get_device_capability(place) >= PDL_CAPABILITY
    wanted = {**BEST_OPTIONS, "triton.enable_pdl": pdl}
    known = torch._inductor.list_options()
    options = {name: value for name, value in wanted.items() if name in known}
    prepare_workers()
    return _frozen(module, *inputs, options=options)


def _frozen(module: nn.Module, *inputs: Tensor, options: dict[str, Any] | None = None) -> Run:
    """Freezing must be on in the first call: as an option of torch.compile it comes after Dynamo
    has made the weights inputs, and freezes nothing.
    """
    compiled = torch.compile(_own_code(module), options=options, dynamic=False)
    if module.training:
        return compiled
    with torch._inductor.config.patch(freezing=True), torch.no_grad():
        compiled(*inputs)
    return compiled


def _own_code(module: nn.Module) -> Run:
    """Calls the module from code of its own: what was compiled for one route is found by the code
    object and would serve the others too, frozen or not.
    """

    def call(*inputs: Tensor) -> Any:
        return module(*inputs)

    code = call.__code__.replace(co_name=call.__name__)
    return FunctionType(code, call.__globals__, call.__name__, None, call.__closure__)


def _inductor(make: Make, **features: bool) -> RouteSpec:
    return RouteSpec(make, channels_last=True, compiles=True, **features)


# Those that can stand in for a plan. A trace for training is not frozen, so one of them is enough.
_ANYWHERE = {
    name: RouteSpec(
        _torchscript if features.frozen else _traced if features.traced else _as_it_is,
        channels_last=features.channels_last,
        frozen=features.frozen,
        stands_in=name != EAGER,  # which runs without plantune, too
        trains=features.frozen or not features.traced,
    )
    for name, features in ROUTE_FEATURES.items()
}
_OWN_GRAPHS = {"static": True, "pooled": True}
# The strongest route of each kind that is known, by the kind of arch.
ROUTES: Mapping[str, Mapping[str, RouteSpec]] = {
    "cpu": {
        **_ANYWHERE,
        "compile-default": RouteSpec(_compiled("default"), compiles=True),
        "compile-frozen": RouteSpec(_frozen, frozen=True, compiles=True, trains=False),
    },
    "cuda": {
        **_ANYWHERE,
        "cuda-graph": RouteSpec(_as_it_is, channels_last=True, captured=True),
        "compile-default": _inductor(_compiled("default")),
        "compile-reduce-overhead": _inductor(
            _compiled("reduce-overhead"), static=True, pooled=True
        ),
        "compile-max-autotune": _inductor(_autotuned, static=True, pooled=True),
        # With freezing, inductor would take images at one address for constants: not static.
        "compile-best": _inductor(_best, frozen=True, pooled=True),
    },
}


def framework_routes(arch: str, mode: str = "infer") -> tuple[str, ...]:
    """The names of the framework's routes on an arch."""
    routes = ROUTES[load_arch(arch).kind]
    return tuple(name for name, route in routes.items() if route.trains or mode == "infer")
