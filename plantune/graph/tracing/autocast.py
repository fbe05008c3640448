"""What autocast does to a call of an overload, found out by calling it on tensors without memory.

The trace comes before autocast, which looks at no tensors of the meta device: its casts become ops
of the graph. Which they are torch itself says, so that no table of its ops stands here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from plantune.graph.spelling import OVERLOADS
from plantune.graph.tracing.purity import Overload

# The kind of device, and the dtype that products are computed in.
Autocast = tuple[str, torch.dtype]
TO_COPY = torch.ops.aten._to_copy.default
TO_DTYPE = torch.ops.aten.to.dtype
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
Dtypes = tuple[torch.dtype, ...]
# Of these autocast sees cuDNN's layer, or oneDNN's on a CPU, of which no tensor without memory can
# be part: it takes numbers, weights and states in autocast's dtype.
RECURRENT = ("aten::lstm", "aten::gru", "aten::rnn_")
# On a CPU it is made of single products, and its state stays wide.
GRU = "aten::gru"


@contextmanager
def under(autocast: Autocast | None) -> Iterator[None]:
    """Autocast as a call had it, for its kind of device alone, which need not be here."""
    before = {kind: _state(kind) for kind in ("cpu", "cuda")}
    try:
        for kind, (_, dtype) in before.items():
            on = autocast is not None and autocast[0] == kind
            _set(kind, on, autocast[1] if on and autocast is not None else dtype)
        yield
    finally:
        for kind, state in before.items():
            _set(kind, *state)


def state_on(kind: str) -> Autocast | None:
    """The caller's autocast on such devices; None if it is off."""
    on, dtype = _state(kind) if kind in ("cpu", "cuda") else (False, torch.float32)
    return (kind, dtype) if on else None


def _state(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _set(kind: str, on: bool, dtype: torch.dtype) -> None:
    torch.set_autocast_enabled(kind, on)
    torch.set_autocast_dtype(kind, dtype)


def casts(
    overload: Overload, args: tuple[Any, ...], kwargs: Mapping[str, Any], autocast: Autocast
) -> Dtypes | None:
    """The dtype in which each tensor among the arguments is taken, in order; None where autocast
    sees the parts that the overload is made of, and not the overload.
    """
    given = tuple(leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    recurrent = overload.name().startswith(RECURRENT)
    if recurrent and (autocast[0] == "cuda" or not overload.name().startswith(GRU)):
        double = torch.float64
        return tuple(
            t if t == double else low
            for t, low in zip(given, _floats_in(autocast[1], given), strict=True)
        )
    key = f"Autocast{autocast[0].upper()}"
    seen = _Seen(overload, args, kwargs, autocast)
    if torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), key):
        return seen.own(given)
    # A recurrent layer may be read, and then its products are autocast's all the same.
    read = str(overload) in OVERLOADS and not recurrent
    if read or not overload.has_kernel_for_dispatch_key(COMPOSITE):
        return given
    return given if seen.is_the_same(given) else None


class _Seen:
    """Runs an overload on tensors that are nowhere, and notes what torch makes of it."""

    def __init__(
        self,
        overload: Overload,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        autocast: Autocast,
    ) -> None:
        self._overload, self._given, self._autocast = overload, (args, dict(kwargs)), autocast

    def own(self, given: Dtypes) -> Dtypes:
        """Where autocast knows the overload itself: it takes numbers in its dtype, or in single
        precision, or in the widest among them. Casts of the overload's own come after these.
        """
        single, low = (_floats_in(dtype, given) for dtype in (torch.float32, self._autocast[1]))
        for uniform, to in ((single, self._autocast[1]), (low, torch.float32)):
            cast, _ = self._run(uniform, self._autocast, whole=False)
            if to in {dtype for dtype, was in zip(cast, uniform, strict=True) if dtype != was}:
                return tuple(
                    dtype if now == was or dtype == torch.float64 else to
                    for dtype, now, was in zip(given, cast, uniform, strict=True)
                )
        if self._gives_single(low):
            return single
        return given if given in (single, low) else self._run(given, self._autocast, whole=False)[0]

    def _gives_single(self, low: Dtypes) -> bool:
        """Whether numbers in few digits have a result in more under autocast alone."""
        with suppress(RuntimeError, NotImplementedError):
            results, plain = (self._run(low, by)[1][-1] for by in (self._autocast, None))
            return bool(results != plain)
        return False

    def is_the_same(self, given: Dtypes) -> bool:
        """Whether autocast changes nothing in what the overload is made of. Of what looks at its
        device, as `one_hot` does, only the dtypes are known: it leaves whole numbers as they are.
        """
        with suppress(RuntimeError, NotImplementedError, AttributeError):
            return self._run(given, self._autocast) == self._run(given, None)
        return not any(dtype.is_floating_point for dtype in given)

    def _called(self, args: Any, kwargs: Any, whole: bool) -> Any:
        """After the casts, what needs a device that is not here may fail."""
        try:
            return self._overload(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            if whole:
                raise
        return None

    def _run(
        self, dtypes: Dtypes, autocast: Autocast | None, *, whole: bool = True
    ) -> tuple[Dtypes, list[Any]]:
        """The dtypes that tensors given in these are cast to at first, and what follows, with the
        dtypes of the results at last.
        """
        left, probes = iter(dtypes), []

        def probe(tensor: Tensor) -> Tensor:
            made = _Probe(tensor.to(next(left)), self._autocast[0])
            probes.append(made)
            return made

        args, kwargs = tree_map_only(Tensor, probe, self._given)
        log, made = _Log(whole), None
        with under(autocast), torch._C.DisableTorchFunction(), log, suppress(_Enough):
            made = self._called(args, kwargs, whole)
        first = _leading_casts(log.entries)
        to = {id(source): dtype for source, dtype in first}
        cast = tuple(to.get(id(p), p.dtype) for p in probes)
        results = [leaf.dtype for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        return cast, [*(entry[1:] for entry in log.entries[len(first) :]), results]


def _floats_in(dtype: torch.dtype, given: Dtypes) -> Dtypes:
    return tuple(dtype if was.is_floating_point else was for was in given)


def _leading_casts(log: list[Any]) -> list[tuple[Any, torch.dtype]]:
    found = []
    for source, overload, _, dtype in log:
        if overload is not TO_COPY:
            break
        found.append((source, dtype))
    return found


class _Enough(Exception):
    """The casts are over."""


class _Log:
    """What is called on probes. One trace runs at a time."""

    open: list[_Log] = []  # noqa: RUF012

    def __init__(self, whole: bool) -> None:
        self.entries: list[Any] = []
        self._whole = whole

    def __enter__(self) -> _Log:
        self.open.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        self.open.pop()

    def note(self, *entry: Any) -> None:
        if not self._whole and entry[1] is not TO_COPY:
            raise _Enough
        self.entries.append(entry)


class _Probe(Tensor):
    """A tensor of a kind of device that need not be here; `held` is without memory."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, kind: str) -> _Probe:
        made: _Probe = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=torch.device(kind)
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Overload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Probe)]
        dtypes = [leaf.dtype for leaf in leaves]
        _Log.open[-1].note(args[0] if args else None, func, dtypes, kwargs.get("dtype"))
        kind = leaves[0].device.type
        held_args, held_kwargs = tree_map_only(_Probe, lambda p: p.held, (args, dict(kwargs)))
        if "device" in held_kwargs:
            held_kwargs["device"] = torch.device("meta")
        made = func(*held_args, **held_kwargs)
        return tree_map_only(Tensor, lambda tensor: _Probe(tensor, kind), made)
