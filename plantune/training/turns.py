"""Says what keeps training steps from being captured: what differs from call to call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from plantune.base.warning import warn
from plantune.graph.nested import leaves
from plantune.runtime.watched.module_signature import ModuleSignature
from plantune.training.captured_step import Arguments, UncapturedStep

# As CallerSettings.now() has them.
SETTINGS = ("autocast", "the precision of float32's products", "deterministic algorithms")
# Of so many calls so many come too seldom to be captured before that is said.
WINDOW, MOST_LOST = 64, 16
MOST_SHOWN, MOST_TEXT = 3, 40
# Each part of a call by its name, as text.
Parts = Mapping[str, str]
TENSORS = "pad batches to fewer sizes, or leave out those that come seldom"
NUMBERS = "give it as a tensor on the GPU, of which a captured step reads the value in each call"
ATTRIBUTE = "keep it in a buffer, which a captured step reads in each call"


class Turns:
    """Counts calls of a training step that capture nothing and are not replayed, because each is
    of another kind than the last ones. If these are many, one warning names what differs.
    """

    def __init__(self) -> None:
        self._calls = self._lost = 0
        self._is_said = False

    def call(self) -> None:
        self._calls += 1
        if self._calls >= WINDOW:
            self._calls = self._lost = 0

    def lose(self, why: Callable[[], str]) -> None:
        """What is known of the kinds of calls so far is dropped; `why` says what differs."""
        self._lost += 1
        if self._lost < MOST_LOST or self._is_said:
            return
        self._is_said = True
        warn(
            f"{self._lost} of the last {max(self._calls, self._lost)} training steps ran op by op "
            f"and were not captured: {why()}",
            UncapturedStep,
        )


def parts_of(settings: Hashable, given: Arguments) -> Parts:
    """What decides the kind of a call."""
    named = settings if isinstance(settings, tuple) else (settings,)
    found = {name: _shown(value) for name, value in zip(SETTINGS, named, strict=False)}
    inputs, targets = given
    for kind, values in (("input", inputs), ("target", targets)):
        for place, value in enumerate(values):
            parts_inside = leaves(value)
            for at, leaf in enumerate(parts_inside):
                inside = f", value {at + 1}" if len(parts_inside) > 1 else ""
                found[f"{kind} {place + 1}{inside}"] = _shown(leaf)
    return found


def _shown(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        grad = ", requires_grad" if leaf.requires_grad else ""
        return f"a tensor {tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}{grad}"
    text = repr(leaf)
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}..."


def what_differs(kinds: Sequence[Parts], kept: int) -> str:
    """Of kinds of calls that come in turn, where so many are `kept`."""
    begin = f"{len(kinds)} kinds of calls or more come in turn, and the last {kept} are kept"
    names = dict.fromkeys(name for parts in kinds for name in parts)
    for name in names:
        values = [*dict.fromkeys(parts.get(name, "missing") for parts in kinds)]
        if len(values) == 1:
            continue
        tensors = all(value.startswith("a tensor") for value in values)
        advice = "leave it as it is" if name in SETTINGS else TENSORS if tensors else NUMBERS
        shown = ", ".join(values[-MOST_SHOWN:])
        return f"{begin}. They differ in {name}: {shown}; {advice}"
    return f"{begin}. They differ in the structure of their arguments"


def what_changed(
    modules: Sequence[nn.Module], before: Sequence[ModuleSignature], now: Sequence[ModuleSignature]
) -> str:
    """Of modules whose captured steps are dropped at each change."""
    for module, old, new in zip(modules, before, now, strict=True):
        found = _attribute(module, old.key, new.key)
        if found is not None:
            name = type(module).__name__
            return (
                f"{name}.{found} changes between calls, and what was captured with it: {ATTRIBUTE}"
            )
    return "parameters, hooks or attributes of the model are replaced between calls: leave them"


def _attribute(module: nn.Module, before: Sequence[Any], now: Sequence[Any]) -> str | None:
    """The path of an attribute that differs, with its value."""
    for (path, _), old, new in zip(module.named_modules(), before, now, strict=False):
        values = dict(old[2])
        for key, value in new[2]:
            if values.get(key) != value:
                plain = f" ({value[1]})" if isinstance(value, tuple) and len(value) == 2 else ""
                return f"{path}.{key}{plain}" if path else f"{key}{plain}"
    return None


def what_is_other(before: Sequence[Any], now: Sequence[Any]) -> str:
    """Of what a training step is made of, as TrainStep has it: optimizer, hooks, model, loss."""
    names = {0: "another optimizer", 3: "another model", 4: "another loss"}
    for at, name in names.items():
        if before[at] is not now[at] and before[at] != now[at]:
            return f"it has {name} in each call: make it once, and give what changes as a tensor"
    return "parameters are replaced, or trained otherwise, between calls: change their values"
