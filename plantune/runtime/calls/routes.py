"""PyTorch's own routes to run a network: one that was faster runs in place of the plan."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plantune.devices.device import first_line
from plantune.graph.nested import kind_of, mapped, tensors_in
from plantune.graph.tracing.arguments import Arguments
from plantune.graph.tracing.eager_strides import Strides
from plantune.graph.tracing.trace import trace
from plantune.plans.plan import EAGER
from plantune.runtime.captured.program_pool import device_of
from plantune.runtime.program.result_strides import with_strides
from plantune.runtime.watched.copies import copied
from plantune.runtime.watched.live_state import LiveState, OwnedTensors

NHWC = torch.channels_last
# A tensor that a trace holds as a constant must be no weight: such are single numbers.
LARGEST_CONSTANT = 1
# The strides that eager gives the results of a call; None if they are not known.
StridesOf = Callable[[tuple[Any, ...], Mapping[str, Any]], Sequence[Strides] | None]


@dataclass(frozen=True)
class RouteFeatures:
    """How a module is prepared for one of PyTorch's routes."""

    channels_last: bool = False
    traced: bool = False
    frozen: bool = False


ROUTE_FEATURES: Mapping[str, RouteFeatures] = {
    EAGER: RouteFeatures(),
    "eager-channels-last": RouteFeatures(channels_last=True),
    "torchscript-traced": RouteFeatures(traced=True),
    "torchscript-traced-channels-last": RouteFeatures(channels_last=True, traced=True),
    "torchscript": RouteFeatures(traced=True, frozen=True),
    "torchscript-channels-last": RouteFeatures(channels_last=True, traced=True, frozen=True),
}


class FrameworkRoute:
    """Runs a module by one of the framework's routes, with the weights that it has now.

    What is traced reads the parameters where they are, and is traced again after one was replaced.
    Filters keep the caller's strides: on a CPU channels_last routes compute with copies of them,
    which are written again after a weight changed, as plans do; on a GPU, where the host
    cannot know of changes, with the filters as they are. Where a route cannot run, eager does.
    """

    def __init__(
        self,
        name: str,
        owned: OwnedTensors,
        *,
        trains: bool = False,
        strides: StridesOf = lambda args, kwargs: None,
    ) -> None:
        self.name = name
        self._strides_of = strides
        self.why_not: str | None = None
        self._features = ROUTE_FEATURES[name]
        self._owned = owned
        self._trains = trains
        self._lock = threading.Lock()
        self._made: tuple[int, int] | None = None
        self._tensors: list[Tensor] = []
        self._copies: dict[str, Tensor] = {}
        self._state: LiveState | None = None
        self._call: Any = owned.module

    is_settled = True

    @property
    def is_eager(self) -> bool:
        """Whether it runs the module as it is."""
        return self.why_not is not None or self._features == ROUTE_FEATURES[EAGER]

    @property
    def is_made(self) -> bool:
        """Whether it is prepared for the module's present tensors; else the next call does that."""
        return self.is_eager or self._now() == self._made

    @property
    def winner(self) -> FrameworkRoute:
        """Itself, as if it had won a race."""
        return self

    def run(self, began_s: float, *args: Any, **kwargs: Any) -> Any:
        """As a race that this route has won."""
        return self(*args, **kwargs)

    def made(self) -> Callable[..., Any]:
        """What gives its results as long as all tensors stay and none is said to be written: what
        was made of them, without the shell of a module around it (3 us of a trace's 15 for three
        layers), unless copies must be looked after.
        """
        features = self._features
        with self._lock:
            is_bare = features.traced and not features.channels_last and self.why_not is None
            bare = self._call.forward if is_bare and self._now() == self._made else self
        return bare

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result. Gradients are recorded if they are switched on."""
        if self.is_eager:
            return self._owned.module(*args, **kwargs)
        with self._lock:
            if self._is_due():
                # What is kept must serve inside and outside of inference mode.
                with torch.inference_mode(False), torch.set_grad_enabled(self._trains):
                    self._renew(args, kwargs)
        if not self._features.channels_last:
            return self._call(*args, **kwargs)
        given = mapped(_channels_last, (args, kwargs))
        result = self._call(*given[0], **given[1])
        wanted = self._strides_of(args, kwargs)
        if wanted is None:
            return _contiguous(result, tensors_in((args, kwargs)))
        left = iter(wanted)
        return mapped(
            lambda leaf: with_strides(leaf, next(left)) if isinstance(leaf, Tensor) else leaf,
            result,
        )

    def _now(self) -> tuple[int, int]:
        return self._owned.moves, self._owned.writes if self._features.frozen else 0

    def _is_due(self) -> bool:
        return self._now() != self._made or (self._state is not None and self._state.changed())

    def _renew(self, args: Any, kwargs: Any) -> None:
        now = self._now()
        if self._features.frozen or not self._holds_them():
            self._make(args, kwargs)
        self._copy()
        self._made = now

    def _holds_them(self) -> bool:
        """Whether what was made computes with the very tensors that the module has."""
        present = self._owned.present
        return (
            self._made is not None
            and len(present) == len(self._tensors)
            and all(a is b for a, b in zip(present, self._tensors, strict=True))
        )

    def _make(self, args: Any, kwargs: Any) -> None:
        module = self._module()
        self._tensors = [*self._owned.present]
        self._call = module
        if not self._features.traced:
            return
        try:
            if kwargs or not all(isinstance(arg, Tensor) for arg in args):
                raise ValueError("it is called with other arguments than positional tensors")
            if self._trains:
                _require_gradients_everywhere(module, args)
            args = [*map(_channels_last, args)] if self._features.channels_last else args
            self._call = self._traced(module, [x.detach() for x in args])
        except Exception as error:  # It may fail in any way that torch knows.
            self.why_not = f"it cannot be traced: {type(error).__name__}: {first_line(error)}"
            self._call = self._owned.module

    def _module(self) -> nn.Module:
        """The module itself, or one with its tensors, but for filters in channels_last."""
        module = self._owned.module
        filters = self._filters() if self._features.channels_last else {}
        self._copies, self._state = {}, None
        if not filters:
            return copied(module) if self._features.frozen else module
        memo: dict[int, Any] = {id(tensor): tensor for tensor in self._owned.present}
        for name, tensor in filters.items():
            own = nn.Parameter(tensor.detach().clone(memory_format=NHWC), requires_grad=False)
            self._copies[name] = memo[id(tensor)] = own
        if not self._features.frozen:  # there weights stay, also in memory that others may write to
            self._state = LiveState(self._owned, filters)
            self._state.changed()
        return copied(module, memo)

    def _filters(self) -> dict[str, Tensor]:
        """The filters of which this keeps copies, by name."""
        if self._trains or device_of(self._owned.module, self._owned.otherwise).type != "cpu":
            return {}
        return {
            name: parameter
            for name, parameter in self._owned.module.named_parameters()
            if parameter.dim() == 4 and not parameter.is_contiguous(memory_format=NHWC)
        }

    def _copy(self) -> None:
        if self._state is None:
            return
        now = self._state.tensors()
        with torch.no_grad():
            for name, own in self._copies.items():
                own.copy_(now[name])

    def _traced(self, module: nn.Module, inputs: Sequence[Tensor]) -> Any:
        """A trace of the module. Its pass leaves buffers and random numbers as they were."""
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        devices = {x.device for x in inputs if x.device.type == "cuda"}
        try:
            with torch.random.fork_rng([*devices]), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch.jit says that it is deprecated
                traced = torch.jit.trace(module, tuple(inputs), check_trace=False)
                _require_no_weight_inside(traced)
                if self._features.frozen:
                    traced = torch.jit.freeze(traced)
                _require_same_structure(module(*inputs), traced(*inputs))
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
        return traced


def _require_gradients_everywhere(module: nn.Module, args: Sequence[Any]) -> None:
    """Raises ValueError, or UnsupportedModule, where torch's trace would pass gradients on through
    what is under no_grad, or by another backward pass than a Function's own.
    """
    records = trace(module, Arguments.of(module, args, {}), derives=True).records
    if any(record.silent or record.derivative is not None for record in records):
        raise ValueError("a part of it is under no_grad, which a trace does not keep")


def _require_same_structure(wanted: Any, got: Any) -> None:
    """Raises ValueError if a trace returns a tuple for what was a list, and the like."""
    if kind_of(wanted, type) != kind_of(got, type):
        raise ValueError("its results come in another structure")


def _require_no_weight_inside(traced: Any) -> None:
    """Raises ValueError if a trace took a tensor for a constant, whose changes it would not see."""
    graph = traced.inlined_graph  # which must outlive its nodes
    for node in graph.findAllNodes("prim::Constant"):
        value = node.output().toIValue()
        if isinstance(value, Tensor) and value.numel() > LARGEST_CONSTANT:
            raise ValueError("it uses a tensor that is neither a parameter nor a buffer")


def _channels_last(x: Any) -> Any:
    images = isinstance(x, Tensor) and x.dim() == 4
    return x.contiguous(memory_format=NHWC) if images else x


def _contiguous(result: Any, like: Sequence[Tensor]) -> Any:
    """The result in the layout that eager likely gives for such inputs."""
    if any(x.dim() == 4 and not x.is_contiguous() for x in like):
        return result
    return mapped(lambda leaf: leaf.contiguous() if isinstance(leaf, Tensor) else leaf, result)
