"""The Python face: `load_model` for known networks, `optimize` for any supported module."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence

from plantune.base.given import require_flag, require_kind, shown
from plantune.base.warning import warn
from plantune.devices.machine import why_no_plans
from plantune.errors import PlantuneWarning, UnsupportedModule
from plantune.graph.nested import leaves, tensors_in
from plantune.graph.tracing.arguments import Arguments
from plantune.graph.types import TensorType, dtype_name
from plantune.models.computing import computing_in
from plantune.models.registry import network
from plantune.plans.database.plan_file import PlanFile, read_plan_file
from plantune.plans.plan import Plan
from plantune.runtime.asked import device_named, refuse_other_settings, refuse_tensors
from plantune.runtime.calls.padding import Padding
from plantune.runtime.module import TunedModule
from plantune.runtime.sharing import SharingModule
from plantune.runtime.watched.copies import copied, shared_state
from plantune.runtime.watched.mirror import Mirror
from plantune.runtime.watched.modes import heeds_training


class TrainingMode(PlantuneWarning):
    """A module was optimized for inference while it is in training mode."""


Weights = Mapping[str, Tensor] | str | os.PathLike[str]
GivenPlan = Plan | str | os.PathLike[str]


# What the networks are trained and served in on each kind of processor.
DEFAULT_DTYPES = {"cpu": torch.float32, "cuda": torch.float16}


def load_model(
    name: str,
    *,
    batch: int | Sequence[int],
    in_channels: int = 3,
    mode: str = "infer",
    dtype: torch.dtype | None = None,
    parameters: torch.dtype | None = None,
    device: torch.device | str | None = None,
    weights: Weights | None = None,
    plan: GivenPlan | None = None,
    frozen: bool = False,
    consistent: bool = False,
    fallback: str = "warn",
) -> TunedModule:
    """A known network as an nn.Module that runs from a plan for this batch, or for each of several:
    with `batch=(128, 2048)` one set of parameters acts on 128 images and learns from 2048.

    `device` is the GPU if there is one, else the CPU; `dtype` float16 on the first, float32 on
    the other. With `parameters=torch.float32` these stay wide and are cast inside of each pass, in
    one launch on a GPU, so that an optimizer needs no copies of them.

    `weights` is a state_dict or the path of a saved one, `plan` a plan or the path of one: JSON of
    `plantune plans export`, or a database of `plantune export`, in which the plan for this call is
    looked for. Without it the plan that a search stored is used, or one that plantune ships, else
    one that estimates choose, or the framework's kernels. Other batches run through the framework.
    `fallback` says whether either comes with a warning, silently, or as an error, NoPlan or
    InputMismatch, in the first such call.

    Weights may change at any time. `frozen` promises that they stay until `refresh()` is called, so
    that what kernels need of them is computed once. On a GPU the network is built in channels_last.

    With `consistent`, in mode "train", calls without gradients run the forward pass of training,
    and other batches the same kernels, so that an image has the same outputs in each, to the bit:
    PPO's ratio is 1 on fresh data. Where that cannot be, InconsistentPlans warns.
    """
    refuse_other_settings(name, in_channels, dtype, parameters, weights)
    batches = _batches(batch)
    spec = network(name)
    place = _usable(device_named(device))
    dtype = dtype or DEFAULT_DTYPES[place.type]
    kept = parameters or dtype
    reference = spec.build(in_channels).to(device=place, dtype=kept).train(mode == "train")
    if place.type == "cuda":
        # There a filter in channels_last is the matrix that kernels read.
        reference.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if kept != dtype:
        reference = computing_in(reference, dtype)
    if weights is not None:
        reference.load_state_dict(_state_dict(weights), strict=True)
    shapes = [spec.input_shape(each, in_channels) for each in batches]
    first, *also = (Arguments((TensorType(shape, dtype_name(dtype)),)) for shape in shapes)
    return TunedModule(
        reference,
        first,
        name=name,
        mode=mode,
        plan=_plan(plan),
        known=kept == dtype,
        fallback=fallback,
        frozen=frozen,
        also=tuple(also),
        consistent=consistent,
    )


def optimize(
    module: nn.Module,
    *example_inputs: Any,
    mode: str = "infer",
    plan: GivenPlan | None = None,
    frozen: bool = False,
    share: bool = False,
    consistent: bool = False,
    fallback: str = "warn",
    pad_to: int | Sequence[int] | None = None,
    **example_kwargs: Any,
) -> TunedModule:
    """A copy of `module` that runs from a plan for calls like the example: `example_inputs` and
    `example_kwargs` are what the module is called with. The plan is the given one (see load_model),
    one that a search stored for a network of the same layers, else kernels that estimates choose or
    the framework's. `fallback` says what becomes of a stored plan that cannot run here, and of
    calls that differ.

    Arguments and results may be tensors, constants, and tuples, lists, dicts or dataclasses of
    them. What is not a tensor is a part of the plan: a call with another constant is another call.

    The module itself stays as it is and shares nothing with the copy; with `share` it shares all
    parameters and buffers, so that an update of either, or another tensor in their place, counts in
    both. The copy then follows whatever else changes in the module: submodules, attributes, hooks,
    pruning, parametrizations, and the modes of parts as long as both are in the same mode as a
    whole. Prune or parametrize the module, not the copy: that takes parameters out of both, and
    only the copy follows.

    Every submodule stays in the training or eval mode that it has; `mode` says only whether
    gradients are planned. Parameters keep their strides: on a GPU, filters in channels_last are
    read as they are, others are packed in each pass. For `frozen` and `consistent` see load_model.
    Raises UnsupportedModule if torch cannot trace it.

    With `pad_to`, one number of samples or several, in mode "infer", there is a plan for each of
    them, and a call with fewer samples runs with the next one: its last sample is repeated, and
    what comes of that is dropped. No sample may depend on another one.
    """
    _refuse_other_kinds(module)
    _refuse_packed(module, (example_inputs, example_kwargs))
    _refuse_lazy(module)
    tensors = tensors_in((example_inputs, example_kwargs))
    own_names: dict[str, Any] = {"mode": mode, "plan": plan, "frozen": frozen, "share": share}
    own_names |= {"consistent": consistent, "fallback": fallback, "pad_to": pad_to}
    refuse_tensors(own_names)
    require_flag("share", share)
    if not tensors:
        kinds = ", ".join(type(leaf).__name__ for leaf in leaves((example_inputs, example_kwargs)))
        raise ValueError(
            "optimize needs an example of a call, with at least one tensor"
            + (f"; got {kinds}" if kinds else "")
        )
    twins = shared_state(module) if share else {}
    own = copied(module, twins)
    example = Arguments.of(module, example_inputs, example_kwargs)
    padding = None if pad_to is None else _padding(own, example, pad_to, mode)
    first, *also = (example,) if padding is None else padding.calls
    how: dict[str, Any] = {"name": type(module).__name__, "mode": mode, "plan": _plan(plan)}
    how |= {"fallback": fallback, "frozen": frozen, "consistent": consistent, "padding": padding}
    how |= {"device": _usable(tensors[0].device), "also": tuple(also)}
    if share:
        tuned: TunedModule = SharingModule(own, first, mirror=Mirror.of(module, twins), **how)
    else:
        tuned = TunedModule(own, first, **how)
    if mode == "infer" and module.training and heeds_training(module):
        warn(
            f"{type(module).__name__} is in training mode, and mode='infer' keeps it so: dropout "
            "drops, and batch norms use the batch's statistics and move their own; call eval() "
            "before, or give mode='train'",
            TrainingMode,
        )
    return tuned


def _refuse_other_kinds(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"optimize takes an nn.Module that is made, got {shown(module)}")
    if type(module).__name__ == "OptimizedModule" and hasattr(module, "_orig_mod"):
        raise UnsupportedModule(
            "optimize takes the module as it was before torch.compile: give module._orig_mod"
        )


def _refuse_packed(module: nn.Module, given: Any) -> None:
    if any(isinstance(leaf, PackedSequence) for leaf in leaves(given)):
        raise UnsupportedModule(
            f"{type(module).__name__} is given a PackedSequence, whose batch sizes are not in its "
            "shapes. Give the padded sequence, and if need be the lengths, as tensors"
        )


def _refuse_lazy(module: nn.Module) -> None:
    lazy = [name for name, p in module.named_parameters() if is_lazy(p)]
    if lazy:
        raise UnsupportedModule(
            f"{type(module).__name__}: {lazy[0]} of a lazy layer has no shape yet; call the module "
            "once before"
        )


def _padding(
    module: nn.Module, example: Arguments, pad_to: int | Sequence[int], mode: str
) -> Padding:
    if mode != "infer":
        raise ValueError("pad_to is for mode='infer': samples added would count in gradients")
    wanted = "a whole number of samples, or several"
    is_one = isinstance(pad_to, int)
    require_kind("pad_to", pad_to, wanted, fits=is_one or isinstance(pad_to, (tuple, list)))
    sizes: tuple[int, ...] = (pad_to,) if isinstance(pad_to, int) else tuple(pad_to)
    return Padding.of(module, example, sizes)


def _batches(batch: int | Sequence[int]) -> tuple[int, ...]:
    """Each once, in their order."""
    given = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    if not given or any(type(each) is not int or each < 1 for each in given):
        raise ValueError(f"batch must be a positive integer, or several of them, got {batch!r}")
    return tuple(dict.fromkeys(given))


def _usable(device: torch.device) -> torch.device:
    """The device with its number; raises UnsupportedDevice unless it is a CPU or a usable GPU."""
    why_no_plans(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _plan(plan: GivenPlan | None) -> Plan | PlanFile | None:
    if plan is None or isinstance(plan, Plan):
        return plan
    wanted = "a plantune.Plan, the path of an exported one, or None"
    require_kind("plan", plan, wanted, fits=isinstance(plan, (str, os.PathLike)))
    return read_plan_file(Path(plan))


def _state_dict(weights: Weights) -> Mapping[str, Tensor]:
    if isinstance(weights, Mapping):
        return weights
    loaded: Mapping[str, Tensor] = torch.load(weights, map_location="cpu", weights_only=True)
    return loaded
