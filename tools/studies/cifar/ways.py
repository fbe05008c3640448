"""Ways to take a training step. Each is called with a batch and with what is told of its phases."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from workloads import Workload

from plantune import LossScale, TrainStep, optimize

Mark = Callable[[str], None]
Step = Callable[[Tensor, Tensor, Mark], Tensor]


@dataclass(frozen=True)
class Precision:
    """Parameters are float32 under autocast to `autocast`, or as they are."""

    autocast: torch.dtype | None = None
    scaled: bool = False  # the loss, so that no gradient vanishes in float16

    def casting(self, device: torch.device) -> AbstractContextManager[Any]:
        # Without its cache, which a capture or a trace would keep.
        on = self.autocast is not None
        return torch.autocast(device.type, self.autocast, enabled=on, cache_enabled=False)


@dataclass(frozen=True)
class Setting:
    """A model on its device with what trains it."""

    workload: Workload
    model: nn.Module
    device: torch.device
    precision: Precision
    fused: bool
    steps: int

    def loss(self, run: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor) -> Tensor:
        outputs = run(images)
        # As autocast takes a loss.
        wide = outputs.float() if self.precision.autocast is not None else outputs
        return self.workload.loss(wide, labels)


class Rates:
    """Moves the rates of an optimizer's groups before each step."""

    def __init__(self, setting: Setting, optimizer: torch.optim.Optimizer) -> None:
        self._part, self._steps = setting.workload.part_of_rate, setting.steps
        self._groups = [(group, float(group["lr"])) for group in optimizer.param_groups]
        self._now, self._last = 0, 1.0

    def move(self) -> None:
        part = self._part(self._now, self._steps)
        self._now += 1
        if part == self._last:
            return
        self._last = part
        for group, whole in self._groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(whole * part)
            else:
                group["lr"] = whole * part


class Stepwise:
    """The step as one writes it for torch, around any way to run the network with its loss."""

    def __init__(
        self,
        setting: Setting,
        run: Callable[[Tensor], Tensor] | None = None,
        capturable: bool = False,
    ) -> None:
        self._setting, self._run = setting, run or setting.model
        self.optimizer = setting.workload.optimizer(
            setting.model, fused=setting.fused, capturable=capturable
        )
        self.scaler = torch.amp.GradScaler(setting.device.type, enabled=setting.precision.scaled)
        self._rates = Rates(setting, self.optimizer)

    def __call__(self, images: Tensor, labels: Tensor, mark: Mark) -> Tensor:
        self._rates.move()
        return self.step(images, labels, mark)

    def step(self, images: Tensor, labels: Tensor, mark: Mark) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        mark("other")
        with self._setting.precision.casting(self._setting.device):
            loss = self.forward(images, labels)
        mark("forward")
        self.scaler.scale(loss).backward()
        mark("backward")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        mark("optimizer")
        return loss.detach()

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return self._setting.loss(self._run, images, labels)


class Compiled(Stepwise):
    """torch.compile of network and loss; a last batch of another size runs as it is."""

    def __init__(self, setting: Setting, batch: int, mode: str) -> None:
        super().__init__(setting)
        self._batch = batch

        def forward(images: Tensor, labels: Tensor) -> Tensor:
            return setting.loss(setting.model, images, labels)

        self._compiled = torch.compile(forward, mode=mode, dynamic=False)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        if len(images) != self._batch:
            return super().forward(images, labels)
        torch.compiler.cudagraph_mark_step_begin()
        # The next step writes over it.
        return self._compiled(images, labels).clone()


class Captured(Stepwise):
    """The whole step as one CUDA graph for each size of a batch."""

    WARM_UP = 3

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, capturable=True)
        for group in self.optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"], device=setting.device)
        self.scaler.scale(torch.ones((), device=setting.device))  # makes its tensors, if any
        self._held = [*(p.detach() for p in setting.model.parameters()), *setting.model.buffers()]
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]] = {}

    def __call__(self, images: Tensor, labels: Tensor, mark: Mark) -> Tensor:
        self._rates.move()
        if len(images) not in self._graphs:
            self._graphs[len(images)] = self._captured(images, labels)
        graph, own, of_own, loss = self._graphs[len(images)]
        own.copy_(images)
        of_own.copy_(labels)
        graph.replay()
        mark("whole")
        return loss.clone()

    def _captured(self, images: Tensor, labels: Tensor) -> Any:
        own, of_own = images.clone(), labels.clone()
        kept = [(tensor, tensor.clone()) for tensor in self._state()]
        known = {id(tensor) for tensor, _ in kept}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(self.WARM_UP):
                self.step(own, of_own, _unmarked)
        torch.cuda.current_stream().wait_stream(side)
        for tensor, value in kept:
            tensor.copy_(value)
        for tensor in self._state():
            if id(tensor) not in known:  # the optimizer's, which begins with zeros
                tensor.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self.step(own, of_own, _unmarked)
        return graph, own, of_own, loss

    def _state(self) -> list[Tensor]:
        """All that a step changes."""
        states = self.optimizer.state.values()
        moved = [t for state in states for t in state.values() if isinstance(t, Tensor)]
        scaler = self.scaler
        scales = [scaler._scale, scaler._growth_tracker] if scaler.is_enabled() else []
        return [*self._held, *moved, *(t for t in scales if t is not None)]


class Whole:
    """plantune.TrainStep: forward, loss, backward and optimizer as one call."""

    def __init__(self, setting: Setting) -> None:
        workload, precision = setting.workload, setting.precision
        self.optimizer = workload.optimizer(setting.model, fused=setting.fused, capturable=False)

        def loss(outputs: Tensor, labels: Tensor) -> Tensor:
            return setting.loss(lambda given: given, outputs, labels)

        self._step = TrainStep(
            setting.model,
            loss,
            self.optimizer,
            scale=LossScale() if precision.scaled else None,
            autocast=precision.autocast,
        )
        self._rates = Rates(setting, self.optimizer)

    def __call__(self, images: Tensor, labels: Tensor, mark: Mark) -> Tensor:
        self._rates.move()
        value: Tensor = self._step(images, labels)
        mark("whole")
        return value


def _unmarked(name: str) -> None:
    """The phases are not recorded."""


def traced(setting: Setting, images: Tensor) -> Stepwise:
    """TorchScript's trace of the network, in training."""
    kept = [(buffer, buffer.clone()) for buffer in setting.model.buffers()]
    with warnings.catch_warnings(), setting.precision.casting(setting.device):
        warnings.simplefilter("ignore")  # torch.jit says that it is deprecated
        run = torch.jit.trace(setting.model, (images,), check_trace=False)
    for buffer, value in kept:  # a trace runs the network
        buffer.copy_(value)
    return Stepwise(setting, run)


def tuned(setting: Setting, images: Tensor) -> Stepwise:
    """The network from its plan, under ordinary autograd."""
    run = optimize(setting.model, images, mode="train", share=True, fallback="silent")
    return Stepwise(setting, run)


def eager(setting: Setting, images: Tensor) -> Stepwise:
    return Stepwise(setting)


def compiled(setting: Setting, images: Tensor) -> Stepwise:
    return Compiled(setting, len(images), "reduce-overhead")


def autotuned(setting: Setting, images: Tensor) -> Stepwise:
    return Compiled(setting, len(images), "max-autotune")


def captured(setting: Setting, images: Tensor) -> Stepwise:
    return Captured(setting)


def whole(setting: Setting, images: Tensor) -> Whole:
    return Whole(setting)
