"""The tuned module: the reference's parameters and face, run from a plan."""

from __future__ import annotations

import threading
import warnings
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from plantune.environment import arch_of, why_no_plans
from plantune.errors import CaptureError, InputMismatch, InvalidPlan, UnsupportedDevice
from plantune.graph.differentiate import differentiate
from plantune.graph.extract import extract
from plantune.graph.graph import Graph
from plantune.graph.types import TensorType, dtype_name
from plantune.memory import in_layout
from plantune.plan import MODES, Plan, check_plan
from plantune.runtime.autograd import run_with_gradients
from plantune.runtime.choose import pool_for
from plantune.runtime.form import Form
from plantune.runtime.live_state import CPU
from plantune.runtime.pool import Pool, device_of
from plantune.space.search_space import SearchSpace, load_search_space

_threads = torch.get_num_threads
FALLBACKS = ("warn", "error", "silent")


class UnplannedCall(UserWarning):
    """A call ran through the framework because no plan covers it."""


class TunedModule(nn.Module):
    """Runs `reference` from plans for one input shape, and eagerly for everything else.

    Parameters, buffers and submodules are the reference's own, under the same names: every change
    of them counts in the next call. In mode "infer" no gradient is recorded. `known` says that a
    search can find a plan for `name`.
    """

    def __init__(
        self,
        reference: nn.Module,
        input_type: TensorType,
        *,
        name: str,
        mode: str,
        plan: Plan | None = None,
        known: bool = False,
        fallback: str = "warn",
        device: torch.device = CPU,
    ) -> None:
        super().__init__()
        _one_of("mode", mode, MODES)
        _one_of("fallback", fallback, FALLBACKS)
        reference.train(mode == "train")
        self._parameters = reference._parameters
        self._buffers = reference._buffers
        self._modules = reference._modules
        self._non_persistent_buffers_set = reference._non_persistent_buffers_set
        self.training = reference.training
        # In a tuple, so that nn.Module does not register it as a child.
        self._reference = (reference,)
        self._input_type = input_type
        self._name = name
        self._mode = mode
        self._plan = plan
        self._known = known
        self._fallback = fallback
        self._warned: set[str] = set()
        self._pools: dict[object, Pool] = {}
        self._last_form: Form | None = None
        self._lock = threading.Lock()
        self._device = device_of(reference, device)
        self._on_cpu = self._device.type == "cpu"
        self._why_no_plans = why_no_plans(self._device)
        first = next(reference.parameters(), None)
        # A module that casts its input is called with what it was made for, such as bytes.
        self._casts = first is not None and first.dtype != input_type.torch_dtype
        if plan is not None:
            self._check_given_plan(self.pool().graph)

    def _check_given_plan(self, graph: Graph) -> None:
        assert self._plan is not None
        if self._plan.graph != graph.digest:
            raise InvalidPlan(
                f"the given plan is for graph {self._plan.graph[:12]}, but {self._name} with input "
                f"{self._input_type.shape} in mode {self._mode} is {graph.digest[:12]}"
            )
        check_plan(self._plan, graph, self._space())

    @property
    def reference(self) -> nn.Module:
        """The module whose meaning this one has; it shares all parameters."""
        return self._reference[0]

    @property
    def plan(self) -> Plan:
        """The plan of the call that this module was made for."""
        return self.pool().plan

    def pool(self) -> Pool:
        """The instances for the call that this module was made for."""
        form = self._form()
        wanted = None if self._mode == "infer" else form.trained()
        return self._pool(form, wanted)

    def train(self, mode: bool = True) -> TunedModule:
        super().train(mode)
        self.reference.training = mode
        return self

    def refresh(self) -> None:
        """Says that weights changed in a way that torch does not record (see LiveState)."""
        with self._lock:
            if self._last_form is not None:
                self._last_form.tensors.writes += 1

    def forward(self, x: Tensor) -> Any:
        if torch.compiler.is_compiling():
            # Dynamo would trace into the kernels' memory; the plan is a compiled whole already.
            return torch.compiler.disable(self._run)(x)
        return self._run(x)

    def _run(self, x: Tensor) -> Any:
        if self._why_no_plans is not None:
            return self._eagerly(x, self._why_no_plans)
        form = self._form()
        reason = self._why_not_called_so(x, form) or _why_not_inside(form)
        if reason is not None:
            return self._eagerly(x, reason)
        gradients = self._mode == "train" and torch.is_grad_enabled()
        wanted = form.trained() if gradients else ()
        if gradients and x.requires_grad:
            wanted = (*wanted, "x")
        pool = self._pool(form, wanted or None)
        if pool.plan.runner == "eager":
            with torch.set_grad_enabled(gradients):
                return self.reference(x)
        if _lacks_determinism(pool.plan):
            return self._eagerly(x, "the plan is not known to be deterministic, as is asked for")
        x = in_layout(x, self._input_type.layout)
        try:
            return self._planned(pool, x, form.parameters(wanted) if wanted else None)
        except torch.OutOfMemoryError:
            reason = "the plan cannot run: out of memory"
        except CaptureError as error:
            reason = f"the plan cannot run: {error}"
        # Behind the handlers: an error keeps the memory of the pass that it ended.
        return self._eagerly(x, reason)

    def _planned(self, pool: Pool, x: Tensor, parameters: dict[str, Tensor] | None) -> Any:
        """The plan's outputs; with gradients where parameters, or the input alone, want them."""
        if parameters is not None:
            return run_with_gradients(pool, x, parameters)
        with pool.lease() as instance:
            return _of_module(instance.forward(x.detach()))

    def _form(self) -> Form:
        """The module's form as it is now; pools of an earlier one are given up."""
        with self._lock:
            form = self._last_form
            if form is None or form.changed():
                form = self._last_form = Form(self.reference, self._device)
                self._pools.clear()
            return form

    def _pool(self, form: Form, wanted: tuple[str, ...] | None) -> Pool:
        # On a CPU a plan is for a number of threads; asking for it takes 0.05 us.
        key = (form.training(), wanted, _threads() if self._on_cpu else 0)
        with self._lock:
            if key not in self._pools:
                self._pools[key] = self._make_pool(form, wanted)
            return self._pools[key]

    def _make_pool(self, form: Form, wanted: tuple[str, ...] | None) -> Pool:
        # On a GPU weights are read where they lie, so nothing is folded into them.
        live = wanted is not None or self._device.type == "cuda"
        graph = extract(self.reference, self._input_type, fold=False if live else None)
        if wanted is not None:
            graph = differentiate(graph, [n for n in wanted if n in graph.types])
        return pool_for(
            graph,
            self._space(),
            form.tensors,
            self._name,
            given=self._plan,
            fallback=self._fallback,
            known=self._known,
        )

    def _space(self) -> SearchSpace:
        return load_search_space(arch_of(self._device))

    def _why_not_called_so(self, x: Tensor, form: Form) -> str | None:
        """Why a call with `x` here cannot run from a plan, None where it can. Raises
        InputMismatch.
        """
        if not isinstance(x, Tensor):
            raise InputMismatch(f"{self._name}: the input must be a tensor, got {type(x).__name__}")
        first = form.first_tensor()
        state = x if first is None else first
        autocast = x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type)
        wanted = self._input_type.torch_dtype if self._casts else state.dtype
        if x.device != state.device or (x.dtype != wanted and not autocast):
            raise InputMismatch(
                f"{self._name}: needs a {wanted} tensor on {state.device}, got {x.dtype} on "
                f"{x.device}; convert the input, or move the module"
            )
        if autocast:
            return "autocast is on, which changes what each op computes"
        return self._why_not_type(x)

    def _why_not_type(self, x: Tensor) -> str | None:
        type_ = self._input_type
        if x.dtype != type_.torch_dtype or x.device != self._device:
            return f"the module was moved to {x.dtype} on {x.device}"
        if tuple(x.shape) != type_.shape:
            return f"there is a plan for input {type_.shape}, got {tuple(x.shape)}"
        return None

    def _eagerly(self, x: Tensor, reason: str) -> Any:
        text = f"{self._name}: {reason}; the framework runs it instead"
        if self._fallback == "error":
            raise InputMismatch(text)
        if self._fallback == "warn" and reason not in self._warned:
            self._warned.add(reason)
            # Up through _run, forward and torch's two frames, to the module's caller.
            warnings.warn(text, UnplannedCall, stacklevel=6)
        return self.reference(x)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_pools"] = {}
        state["_last_form"] = None
        state["_warned"] = set()
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        with suppress(UnsupportedDevice):  # a GPU that is not here is told by the call
            self._why_no_plans = why_no_plans(self._device)

    def extra_repr(self) -> str:
        return f"plantune {self._mode} plan for {self._input_type.shape}"


def _why_not_inside(form: Form) -> str | None:
    """Why the module cannot run from a plan, whatever it is called with."""
    if form.has_hooks():
        return "submodules have hooks, which a plan cannot call"
    if not form.has_parameters():
        return "parameters are replaced by plain tensors, as functional_call does"
    return None


def _lacks_determinism(plan: Plan) -> bool:
    """Whether determinism is asked for, and no search saw the plan's kernels give the same bits
    again.
    """
    return torch.are_deterministic_algorithms_enabled() and not plan.evidence.get("deterministic")


def _of_module(outputs: tuple[Tensor, ...]) -> Any:
    """What the module returned where the graph has these outputs."""
    return outputs if len(outputs) > 1 else outputs[0]


def input_type_of(example: Tensor) -> TensorType:
    """The type of a call with `example`, in the layout that it has."""
    channels_last = example.dim() == 4 and example.is_contiguous(memory_format=torch.channels_last)
    layout = "nhwc" if channels_last and not example.is_contiguous() else "nchw"
    return TensorType(tuple(example.shape), dtype_name(example.dtype), layout)


def _one_of(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{what} must be one of {', '.join(known)}, got {value!r}")
