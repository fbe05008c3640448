"""What runs one kind of call: the instances of a plan, or a route of the framework's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from plantune.devices.cuda.flags import precisions_of_calls
from plantune.graph.graph import Graph
from plantune.graph.outputs import Outputs
from plantune.graph.tracing.eager_strides import Strides
from plantune.kernels.torch_ops import errs_in_channels_last
from plantune.plans.plan import EAGER, PROGRAM
from plantune.runtime.calls.framework import LastCall
from plantune.runtime.calls.inputs import PlannedCall
from plantune.runtime.calls.route_race import RouteRace
from plantune.runtime.calls.routes import FrameworkRoute
from plantune.runtime.calls.shipped_race import ShippedRace
from plantune.runtime.captured.program_pool import MOST_PASSES, ProgramPool
from plantune.runtime.watched.module_signature import ModuleSignature
from plantune.runtime.watched.torch_internals import asks_for_determinism

# Of each parameter and input whether it gets a gradient; None in inference.
Trained = tuple[bool, ...] | None
# What runs in place of a plan's program, or races with it.
Substitute = FrameworkRoute | RouteRace | ShippedRace


# How many threads compute on a CPU, and what products of float32 are rounded to on a GPU.
TorchSettings = int | tuple[str, ...]


def torch_settings_of(device: torch.device) -> Callable[[], TorchSettings]:
    """Says torch's settings that a plan there depends on; a user may change them at any time."""
    return torch.get_num_threads if device.type == "cpu" else precisions_of_calls


def heeds_torch_settings(graph: Graph, device: torch.device) -> bool:
    """Whether a plan for the graph depends on them: on a GPU they are about float32 alone."""
    return device.type == "cpu" or graph.multiplies_float32


class Planned:
    """The instances for one kind of call, and what the module makes of their outputs."""

    def __init__(
        self,
        pool: ProgramPool,
        outputs: Outputs,
        device: torch.device,
        call: PlannedCall,
        settings: TorchSettings,
    ) -> None:
        self.pool = pool
        pool.lay_out(call.arguments, in_rows=outputs.calls is None)
        self._tensors_of = call.tensors
        self.under_autocast = call.arguments.autocast is not None
        self.outputs = outputs
        self.settings = settings
        self.is_deterministic = bool(pool.plan.evidence.get("deterministic"))
        self._on_gpu = device.type == "cuda"
        self.how = "captured" if device.type == "cuda" else "planned"
        # Signatures hold what is planned: in a cycle its memory would wait for the garbage
        # collector.
        self._leaves: tuple[Callable[[], ModuleSignature | None], Mapping[str, Tensor]] = (
            (lambda: None),
            {},
        )
        self.substitute = self._substitute()
        self.call = self._call(self.how if self.substitute is None else self.substitute.name)

    @property
    def is_eager(self) -> bool:
        """Whether eager runs such calls from now on."""
        winner = None if self.substitute is None else self.substitute.winner
        return winner is not None and winner.is_eager

    def run_substitute(self, began_s: float, *args: Any, **kwargs: Any) -> Any:
        """Calls the substitute of the program while there is one."""
        substitute = self.substitute
        if substitute is None:
            return self._of_program(*args, **kwargs)
        return substitute.run(began_s, *args, **kwargs)

    def settle(self) -> None:
        """Takes over what calls have shown since the last look."""
        substitute = self.substitute
        if isinstance(substitute, ShippedRace) and substitute.is_over:
            self._take(substitute)
        elif isinstance(substitute, RouteRace) and substitute.name == PROGRAM:
            self.substitute = None
        how = self.how if self.substitute is None else self.substitute.name
        if self.call.how != how:
            self.call = self._call(how)

    def _take(self, race: ShippedRace) -> None:
        """What such a race has found runs from now on."""
        if race.has_won and race.pool is not None:
            self.pool = race.pool
            self.is_deterministic = bool(self.pool.plan.evidence.get("deterministic"))
            self.substitute = None
        else:
            self.substitute = race.race

    def leaves(self, signature: ModuleSignature, trained: tuple[bool, ...]) -> Mapping[str, Tensor]:
        """The module's parameters that get a gradient, by name. No other one may be part of
        autograd's graph: its hooks would be called with None.
        """
        of, found = self._leaves
        if of() is not signature:
            named = signature.parameters(trained)
            found = {n: named[n] for n, _ in self.pool.graph.gradients if n in named}
            self._leaves = ref(signature), found
        return found

    def why_not_now(self, trained: Trained) -> str | None:
        """Why such a call cannot run from the plan at this moment."""
        if not self.is_deterministic and asks_for_determinism():
            return "the plan is not known to be deterministic, as is asked for"
        if trained is not None and self.pool.busy() >= MOST_PASSES:
            return f"{MOST_PASSES} passes wait for their backward pass already"
        return None

    def _call(self, how: str) -> LastCall:
        plan = self.pool.plan
        if how == self.how:
            return LastCall(how, f"plan {plan.digest[:12]} covers it")
        if plan.is_unsearched:
            return LastCall(how, "nothing faster is known")
        if plan.route_for(frozen=self.pool.frozen) == how:
            return LastCall(how, "the plan says that it was faster")
        return LastCall(how, "the plan is from another machine and has not been faster here so far")

    def _substitute(self) -> Substitute | None:
        """What runs in place of the plan's program, or races with it until one is known to be
        faster.

        On a GPU a plan serves all of its arch; CPUs differ more.
        """
        pool = self.pool
        if self.under_autocast:  # which a trace would keep
            eager = pool.plan.route_for(frozen=pool.frozen) != PROGRAM
            return FrameworkRoute(EAGER, pool.owned) if eager else None
        name, trains = (
            pool.plan.route_for(frozen=pool.frozen),
            pool.graph.backward_from is not None,
        )
        strides = partial(_strides_of, pool, self._tensors_of)
        race = partial(RouteRace, pool.owned, frozen=pool.frozen, strides=strides)
        if not trains and not pool.graph.updates and pool.space.arch.kind == "cpu":
            if pool.match == "compatible" and name == PROGRAM:
                return race(program=self._of_program)
            if pool.plan.is_unsearched and name != PROGRAM:
                tried = pool.shipped
                return race() if tried is None else ShippedRace(race(), tried, self._running)
        if name != PROGRAM and self._on_gpu and any(map(errs_in_channels_last, pool.graph.nodes)):
            name = EAGER
        if name == PROGRAM:
            return None
        return FrameworkRoute(name, pool.owned, trains=trains, strides=strides)

    def _of_program(self, *args: Any, **kwargs: Any) -> Any:
        return self.outputs.of(self.pool.run(*self._tensors_of(args, kwargs)))

    def _running(self, pool: ProgramPool) -> Callable[..., Any]:
        """What runs calls from other instances."""
        pool.come_as(self.pool.result_strides)
        return lambda *args, **kwargs: self.outputs.of(pool.run(*self._tensors_of(args, kwargs)))


def _strides_of(
    pool: ProgramPool,
    tensors_of: Callable[[Any, Any], Sequence[Tensor]],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Sequence[Strides] | None:
    """What eager gives the results of such a call."""
    strides = pool.result_strides
    return None if strides is None else strides.of(tensors_of(args, kwargs))
