"""What runs the model of a training step: its plan, for inputs of each kind."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor, nn

from plantune.base.warning import warn
from plantune.errors import InvalidGraph, UnsupportedModule
from plantune.graph.nested import kind_of, tensors_in
from plantune.graph.tracing.arguments import Arguments
from plantune.plans.plan import Plan
from plantune.runtime.calls.framework import UnplannedCall
from plantune.runtime.module import TunedModule
from plantune.training.one_plan import agreed
from plantune.training.ranks import Ranks

# Such as whole batches and the last one of an epoch; other calls go to the module itself.
MOST_KINDS = 4


class Models:
    """The tuned modules of one model, made at the first call with inputs of their kind; all compute
    with the model's own weights. Of several ranks all run from the plan of rank 0.
    """

    def __init__(self, model: nn.Module, ranks: Ranks | None = None) -> None:
        self.model, self._ranks = model, ranks
        self._made: dict[Hashable, Callable[..., Any]] = {}
        self._agreed = ranks is None
        self._seen = 0
        self._themselves: nn.Module | None = None

    def __call__(self, *inputs: Any) -> Any:
        model = self._for(inputs)
        self._seen += not isinstance(model, TunedModule) or model.is_hooked()
        return model(*inputs)

    def run_themselves(self, why: str) -> bool:
        """Leaves the plans; False if that was done before."""
        if self._themselves is not None:
            return False
        model = self.model
        self._themselves = model.reference if isinstance(model, TunedModule) else model
        text = f"{type(self._themselves).__name__} runs itself in this TrainStep: {why}"
        warn(text, UnplannedCall)
        return True

    @property
    def are_left(self) -> bool:
        """Whether the model runs itself."""
        return self._themselves is not None

    def seen(self) -> int:
        """How many calls there were whose inputs more than a plan may have read."""
        made = (*self._made.values(), self.model)
        eager = {id(m): m.eager_calls() for m in made if isinstance(m, TunedModule)}
        return self._seen + sum(eager.values())

    def _for(self, inputs: tuple[Any, ...]) -> Callable[..., Any]:
        if self._themselves is not None:
            return self._themselves
        if isinstance(self.model, TunedModule):
            if not self._agreed:
                self._agree(self.model)
            return self.model
        kind = kind_of(inputs, _of_leaf)
        try:
            if kind not in self._made and len(self._made) < MOST_KINDS:
                self._made[kind] = self._new(inputs, kind)
        except TypeError:  # an argument that cannot be compared
            return self.model
        return self._made.get(kind, self.model)

    def _new(self, inputs: tuple[Any, ...], kind: Hashable) -> Callable[..., Any]:
        if self._ranks is None:
            return self._tuned(inputs) or self.model
        return agreed(self._ranks, repr(kind), lambda plan: self._tuned(inputs, plan)) or self.model

    def _agree(self, model: TunedModule) -> None:
        assert self._ranks is not None
        self._agreed = True
        agreed(self._ranks, repr(model), model.run_from)

    def _tuned(self, inputs: tuple[Any, ...], plan: Plan | None = None) -> TunedModule | None:
        """None if no plan covers such a call, which is said."""
        tensors = tensors_in(inputs)
        if not tensors:
            return None
        try:
            return TunedModule(
                self.model,
                Arguments.of(self.model, inputs, {}),
                name=type(self.model).__name__,
                mode="train",
                plan=plan,
                device=tensors[0].device,
            )
        except (UnsupportedModule, InvalidGraph) as error:
            text = f"no plan runs {type(self.model).__name__} in a TrainStep: {error}"
            warn(text, UnplannedCall)
            return None


def _of_leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return type(leaf), leaf.shape, leaf.dtype, leaf.device
    kept: Hashable = leaf
    return type(leaf), kept
