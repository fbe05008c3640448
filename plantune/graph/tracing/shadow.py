"""A module as a trace runs it: other objects of the same classes, with tensors without memory."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from plantune.errors import UnsupportedModule
from plantune.graph.tracing import averages
from plantune.graph.tracing.arguments import CONSTANTS
from plantune.graph.tracing.shapes import META
from plantune.graph.tracing.side_effects.containers import Containers

# torch's recurrent layers keep lists of their weights, which they make anew for other tensors.
OWN_LISTS = {"_flat_weights", "_flat_weight_refs"}
# What torch keeps for each module.
OF_TORCH = frozenset(vars(nn.Module())) | OWN_LISTS

# What takes such a module, too.
DOOR = 'torch.compile(module, backend="plantune") cuts round it: take that'


def unsupported(
    module: nn.Module, place: str, what: str, line: str = "", other: str = "it in another way"
) -> UnsupportedModule:
    return UnsupportedModule(
        f"{type(module).__name__}, at {place or 'its own forward'}: {what} cannot be part of a "
        f"plan. {DOOR}, or write {other}" + (f"; {line}" if line else "")
    )


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Each parameter and buffer under its first name: tied weights are one value."""
    named = (*module.named_parameters(), *module.named_buffers())
    first: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in named:
        first.setdefault(id(tensor), (name, tensor))
    return dict(first.values())


class Shadow:
    """Has the attributes of the module and its submodules, but for their parameters and buffers.
    Nothing of the module itself changes.
    """

    def __init__(
        self, module: nn.Module, stand_in: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """`stand_in` makes what stands for a parameter or buffer: one without memory by default."""
        self._module = module
        make = stand_in or _without_memory
        named = state_of(module)
        # What stands for each parameter and buffer, by its identity.
        self.stand_ins = {id(tensor): make(tensor) for tensor in named.values()}
        self.state = {name: self.stand_ins[id(tensor)] for name, tensor in named.items()}
        # What the forward assigned to attributes, by their names: tensors alone.
        self.assigned: dict[str, Tensor] = {}
        self._path: list[str] = []
        self._containers = Containers()
        self._made = self._shadows()
        self._before = self._tables()

    @property
    def place(self) -> str:
        """The path of the module in whose forward the call is, or stopped."""
        return self._path[-1] if self._path else ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own forward makes; raises UnsupportedModule if it assigned to self."""
        made = self._made[id(self._module)](*args, **kwargs)
        shadows = self._made.values()
        passing = {id(each._buffers): each._non_persistent_buffers_set for each in shadows}
        for table, then in zip(self._tables(now=True), self._before, strict=True):
            for key in {**then, **table}:
                found = table.get(key)
                if key in OWN_LISTS or _is_the_same(found, then.get(key)):
                    continue
                renews = then.get(key) is None or key in passing.get(id(table), ())
                if not (isinstance(found, Tensor) and renews):
                    raise self.assigns(key, tensor=isinstance(found, Tensor))
                self.assigned[key] = found
        return made

    def attribute_of(self, tensor: Tensor) -> str:
        """The path of the attribute that holds a tensor which is neither parameter nor buffer,
        itself, in a list or dict, or in a module that is no submodule.
        """
        for path, child in self._module.named_modules():
            for key, held in vars(child).items():
                found = None if key in OF_TORCH else place_in(held, tensor)
                if found is not None:
                    return f"self.{path}.{key}{found}" if path else f"self.{key}{found}"
        return ""

    def assigns(self, key: str, *, tensor: bool) -> UnsupportedModule:
        own = {"other": f"into a buffer, self.{key}.copy_(...)"} if tensor else {}
        what = f"a forward that assigns to self.{key}"
        if any(
            isinstance(getattr(type(m), key, None), cached_property) for m in self._made.values()
        ):
            what += ", a cached property that was not read before,"
        return unsupported(self._module, "", what, **own)

    def remembered(self) -> list[Tensor]:
        """What the forward has put into dicts of the module's; raises UnsupportedModule if it
        changed them, or other containers, in another way.
        """
        found = self._containers.remembered()
        if found is None:
            what = "a forward that changes a list, set or dict of the module's"
            raise unsupported(self._module, "", what)
        return found

    def _shadows(self) -> dict[int, nn.Module]:
        """A shadow of each submodule, by the identity of what it stands for."""
        made: dict[int, nn.Module] = {}
        for path, child in self._module.named_modules():
            self._check_module(path, child)
            shadow = made[id(child)] = object.__new__(type(child))
            shadow.__dict__.update(
                (k, v if k in OF_TORCH else self._containers.copied(v))
                for k, v in vars(child).items()
            )
            for table in ("_parameters", "_buffers"):
                shadow.__dict__[table] = {
                    key: tensor if tensor is None else self.stand_ins[id(tensor)]
                    for key, tensor in vars(child)[table].items()
                }
            shadow.__dict__["_modules"] = dict(child._modules)
            if averages.averages_all(child):
                shadow.__dict__["forward"] = types.MethodType(averages.forward, shadow)
            shadow.__dict__["_forward_pre_hooks"] = {0: self._enters(path)}
            shadow.__dict__["_forward_hooks"] = {0: self._leaves}
        for shadow in made.values():
            children = shadow._modules
            children.update({k: made[id(c)] for k, c in children.items() if c is not None})
            for name, value in vars(shadow).items():
                if isinstance(value, types.MethodType) and id(value.__self__) in made:
                    own = types.MethodType(value.__func__, made[id(value.__self__)])
                    shadow.__dict__[name] = own
        return made

    def _check_module(self, path: str, child: nn.Module) -> None:
        if isinstance(child, torch.jit.ScriptModule):
            raise unsupported(self._module, path, "a scripted module")
        if child._forward_hooks or child._forward_pre_hooks:
            raise unsupported(self._module, path, "a module with forward hooks")

    def _enters(self, path: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._path.append(path)

        return enter

    def _leaves(self, module: nn.Module, args: Any, result: Any) -> None:
        self._path.pop()

    def _tables(self, *, now: bool = False) -> list[dict[str, Any]]:
        """Where an assignment to an attribute can go; as copies, unless they are those of now."""
        tables = [
            table
            for shadow in self._made.values()
            for table in (vars(shadow), shadow._parameters, shadow._buffers, shadow._modules)
        ]
        return tables if now else [dict(table) for table in tables]


def _is_the_same(found: Any, before: Any) -> bool:
    """Whether an attribute is what it was, or a constant that is equal, as the shape of the last
    call is for another call of that shape.
    """
    if found is before:
        return True
    flat = found if isinstance(found, tuple) else (found,)
    constant = all(isinstance(part, CONSTANTS) for part in flat) and type(found) is type(before)
    return constant and repr(found) == repr(before)


def place_in(held: Any, tensor: Tensor, depth: int = 4) -> str | None:
    """Where a value has the tensor, as one would write it behind the value's name."""
    if held is tensor:
        return ""
    if isinstance(held, nn.Module):
        named = (*held.named_parameters(), *held.named_buffers())
        return next((f".{name}" for name, own in named if own is tensor), None)
    parts = list(enumerate(held)) if isinstance(held, (list, tuple)) and depth else []
    parts = [*held.items()] if isinstance(held, dict) and depth else parts
    found = ((key, place_in(part, tensor, depth - 1)) for key, part in parts)
    return next((f"[{key!r}]{place}" for key, place in found if place is not None), None)


def _without_memory(tensor: Tensor) -> Tensor:
    """In row-major order: a graph depends on no strides."""
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=META)
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
