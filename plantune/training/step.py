"""One training step as one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from inspect import Parameter, signature
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plantune.devices.machine import arch_of
from plantune.errors import BuildError, CudaError, UnsupportedDevice
from plantune.runtime.module import TunedModule
from plantune.runtime.sharing import SharingModule
from plantune.space.arch import Arch, load_arch
from plantune.training.caller_settings import CallerSettings
from plantune.training.capturable_update import CapturableUpdate, can_be_captured
from plantune.training.captured_step import Arguments
from plantune.training.data_parallel import DataParallel, settings_of
from plantune.training.device_update import DeviceUpdate, can_update
from plantune.training.given import refuse_other_parts, refuse_other_settings
from plantune.training.groups import Group
from plantune.training.loss_pass import LossPass
from plantune.training.loss_scale import LossScale
from plantune.training.models import Models
from plantune.training.own_state import state_of
from plantune.training.random_state import load_random_state, random_state
from plantune.training.replays import Passes, Replays
from plantune.training.rules import has_hooks
from plantune.training.second_gradients import PlansOrModel
from plantune.training.turns import Turns, what_is_other
from plantune.training.update import FlatGradients, Rules, TorchUpdate, Update

# Those of torch, by name: to import them takes long.
SENDERS = frozenset(("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"))
_hooks_of = attrgetter("_backward_hooks")


class TrainStep:
    """`value = step(x, y)`: forward, `loss(model(x), y)`, backward, and a step of the optimizer.

    `x` is the model's input, or a tuple of its inputs; what follows goes to the loss. The loss is
    any callable that returns one number, or a tuple that begins with it; the call returns the same,
    detached, in memory of the caller's. The model runs from its plan; a tuned module keeps the plan
    that it has. Weights, and the optimizer's groups and state, stay where they are: schedulers,
    evaluation between steps and checkpoints see them as ever, and `.grad` is left alone.

    `micro_batches` splits each batch into so many equal parts and takes their mean. `max_norm`
    clips gradients as torch.nn.utils.clip_grad_norm_ does. With a `scale` steps whose gradients are
    not finite are left out. `autocast` is the dtype under which model and loss run; without it they
    do under the caller's autocast, and the optimizer never does.

    With a `process_group` each of its processes makes the same calls, with its own part of a batch:
    all begin with rank 0's weights and run from its plan, and the step is of the mean of their
    gradients, which is sent as `reduce_dtype` if that is given. A process that waits longer than
    `deadline_s` for another one ends.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any],
        optimizer: Optimizer,
        *,
        micro_batches: int = 1,
        max_norm: float | None = None,
        scale: LossScale | None = None,
        autocast: torch.dtype | None = None,
        process_group: Group | None = None,
        reduce_dtype: torch.dtype | None = None,
        deadline_s: float = 600.0,
    ) -> None:
        refuse_other_parts(model, loss, optimizer)
        others = process_group, reduce_dtype, deadline_s
        refuse_other_settings(micro_batches, max_norm, scale, autocast, others)
        _refuse_wrappers(model)
        _refuse_others(optimizer)
        self.model = model
        self.loss = loss
        self.optimizer = optimizer
        self.micro_batches = micro_batches
        self.autocast = autocast
        self._rules = Rules(max_norm, scale)
        self._others = (
            None if process_group is None else DataParallel(process_group, reduce_dtype, deadline_s)
        )
        self._models = self._models_of(model)
        self._parameters: list[Tensor] = []
        self._pointers: list[int] = []
        self._traits: tuple[Any, ...] = ()
        self._settings = CallerSettings()
        self._turns = Turns()
        self._run: Passes | Replays | None = None
        self._update: Update
        self._follow_parameters()
        if self._others is not None:
            settings = settings_of(
                *(optimizer, scale),
                micro_batches=micro_batches,
                max_norm=max_norm,
                autocast=autocast,
                reduce_dtype=reduce_dtype,
            )
            modules = self._modules()
            self._others.start(self._device, modules, [*settings], self._abandon, self.close)

    @property
    def scale(self) -> LossScale | None:
        return self._rules.scale

    @property
    def gradient_norm(self) -> Tensor:
        """That of the last step's gradients, unscaled and before they were clipped."""
        return self._update.gradient_norm()

    @property
    def found_inf(self) -> Tensor:
        """1 if the last step was left out because its gradients were not finite, else 0."""
        return self._update.found_inf.clone()

    def __call__(self, inputs: Any, *targets: Any) -> Any:
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        with self._turn():
            self._follow_parameters()
            assert self._run is not None
            return self._run((given, targets))

    def marked(self, mark: Callable[[str], None], inputs: Any, *targets: Any) -> Any:
        """One step, op by op: `mark` is called with "forward", "backward" and "optimizer" once each
        of these is enqueued, so that they can be timed.
        """
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        with self._turn():
            self._follow_parameters()
            assert self._run is not None
            passes = self._run.passes if isinstance(self._run, Replays) else self._run
            return passes((given, targets), mark)

    def state_dict(self) -> dict[str, Any]:
        """What a later run needs, beside the model's own state, to go on exactly: the optimizer's
        state, the loss scale and torch's random numbers.
        """
        return {
            "optimizer": self.optimizer.state_dict(),
            "scale": None if self.scale is None else self.scale.state_dict(),
            "random": random_state(self._device),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        missing = {"optimizer", "scale", "random"} - state.keys()
        if missing:
            raise ValueError(
                f"this is no state_dict() of a TrainStep: it lacks {', '.join(sorted(missing))}"
            )
        if (state["scale"] is None) != (self.scale is None):
            raise ValueError(
                "the state was saved with a loss scale and this step has none, or the other way "
                "round: make the step with the same `scale`"
            )
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scale is not None:
            self.scale.load_state_dict(state["scale"])
        load_random_state(state["random"], self._device)

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which have a copy of the model and capture graphs of their own."""
        if self._others is not None:
            raise TypeError(
                "a TrainStep of a process group cannot be copied or pickled: keep its state_dict() "
                "and make one in each process"
            )
        names = ("model", "loss", "optimizer", "micro_batches", "autocast")
        rules = {"max_norm": self._rules.max_norm, "scale": self.scale}
        return {**{name: getattr(self, name) for name in names}, **rules}

    def __setstate__(self, state: dict[str, Any]) -> None:
        TrainStep.__init__(self, **state)

    def refresh(self) -> None:
        """Has the next call read again what is captured: Python values that the loss or the model
        reads from elsewhere than their arguments and attributes.
        """
        if isinstance(self._run, Replays):
            self._run.let_go()

    def close(self) -> None:
        """Gives up what was captured, and leaves the process group: no call follows. Called before
        torch destroys the group, too, as that would wait for graphs that hold its collectives.
        """
        self.refresh()
        if self._others is not None:
            self._others.close()

    def _abandon(self) -> None:
        if isinstance(self._run, Replays):
            self._run.abandon()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        others = nullcontext() if self._others is None else self._others.turn()
        with self._settings.noted(self._device.type, self.autocast), others:
            yield

    def _follow_parameters(self) -> None:
        """The parameters of the optimizer's groups that are trained now, wherever they are."""
        if isinstance(self.model, SharingModule):
            self.model._follow()  # a replay asks it for nothing
        groups = self.optimizer.param_groups
        found = [p for group in groups for p in group["params"] if p.requires_grad]
        pointers = [p.data_ptr() for p in found]
        same = len(found) == len(self._parameters) and all(map(is_, found, self._parameters))
        traits = self._traits_now(found)
        same = same and pointers == self._pointers and traits == self._traits
        if found and same and self._update.has_room():
            return
        if isinstance(self._run, Replays):
            self._turns.lose(partial(what_is_other, self._traits, traits))
        self._device = _device_of(found)
        self._parameters, self._pointers, self._traits = found, pointers, traits
        self.refresh()
        if self.scale is not None:
            self.scale.place(self._device)
        self._run = self._made(found)

    def _traits_now(self, parameters: list[Tensor]) -> tuple[Any, ...]:
        """What decides how these parameters are trained, beside where they are."""
        optimizer = self.optimizer
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        hooks = tuple(chain.from_iterable(filter(None, map(_hooks_of, parameters))))
        python = self.model, self.loss, self.micro_batches
        return optimizer, has_hooks(optimizer), hooks, *python, *sizes

    def _models_of(self, model: nn.Module) -> Models:
        return Models(model, None if self._others is None else self._others.ranks)

    def _made(self, parameters: list[Tensor]) -> Passes | Replays:
        device, rules = self._device, self._rules
        if self._models.model is not self.model:  # another one was put in its place
            _refuse_wrappers(self.model)
            self._models = self._models_of(self.model)
        arch = _arch_of(device)
        gradients = FlatGradients(parameters, device, arch)
        backward = LossPass(
            *(self._models, self.loss, parameters, self.micro_batches, self._settings),
            captured=device.type == "cuda",
        )
        self._update = self._update_of(gradients, arch)
        others = self._others
        whole = self.micro_batches == 1
        reducer = None if others is None else others.reducer(gradients, device, overlaps=whole)

        def run(given: Arguments, mark: Callable[[str], None] | None = None) -> Any:
            scale = None if rules.scale is None else rules.scale.scale
            if reducer is None:
                return backward.run(*given, scale, gradients.take, mark)
            with reducer.passing():
                value = backward.run(*given, scale, reducer.take, mark)
            reducer.reduce()
            return value

        modules = self._modules()
        state = self._models.seen, self._settings.now, partial(state_of, modules, self.loss)
        run_any = PlansOrModel(run, self._models, state[-1], device)
        passes = Passes(run_any, gradients, self._update, modules, *state)
        if device.type != "cuda":
            return passes
        return Replays(passes, device, None if others is None else others.ranks, self._turns)

    def _update_of(self, gradients: FlatGradients, arch: Arch | None) -> Update:
        optimizer, rules = self.optimizer, self._rules
        if arch is not None and can_update(optimizer, gradients.parameters):
            with suppress(BuildError, CudaError):
                return DeviceUpdate(optimizer, gradients, rules, arch)
        if arch is not None and self._device.type == "cuda" and can_be_captured(optimizer):
            return CapturableUpdate(optimizer, gradients, rules, arch)
        return TorchUpdate(optimizer, gradients, rules)

    def _modules(self) -> tuple[nn.Module, ...]:
        """Those whose state decides what a step computes."""
        model = self.model.reference if isinstance(self.model, TunedModule) else self.model
        return (model, self.loss) if isinstance(self.loss, nn.Module) else (model,)


def _refuse_wrappers(model: nn.Module) -> None:
    """Those that send gradients where autograd adds them up in `.grad`, which a step does not."""
    names = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    for wrapper in SENDERS.intersection(names):
        raise ValueError(
            f"{wrapper} would not send the gradients of a TrainStep: give it the module inside, "
            "and process_group=torch.distributed.group.WORLD"
        )


def _refuse_others(optimizer: Optimizer) -> None:
    """Those that compute the loss again within a step, as LBFGS, or take no dense gradients."""
    closure = signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} asks for the loss several times a step, which a TrainStep "
            "computes once: call its step(closure) with a tuned module in the closure"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            "SparseAdam takes sparse gradients alone, and those of a TrainStep are dense: "
            "take Adam, or step the module itself"
        )


def _arch_of(device: torch.device) -> Arch | None:
    """None where plantune has no kernels."""
    try:
        return load_arch(arch_of(device))
    except UnsupportedDevice:
        return None


def _device_of(parameters: list[Tensor]) -> torch.device:
    if not parameters:
        raise ValueError(
            "none of the optimizer's parameters requires a gradient, so there is nothing to train: "
            "give the optimizer those that do, or call requires_grad_(True) on some"
        )
    devices = {parameter.device for parameter in parameters}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"the optimizer's parameters must be on one device, got {found}")
    return devices.pop()
