"""What a plan solves: the layers of one call, in one mode, on one arch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from plantune.devices.cuda.flags import PRECISION_OF, PRECISIONS, Precisions
from plantune.errors import InvalidGraph, InvalidPlan
from plantune.graph.graph import Graph, Named
from plantune.graph.types import TensorType
from plantune.plans.precisions import precisions_of

# A tensor by its type; any other argument is a plain value of Python.
Argument = TensorType | bool | int | float | str | None
# The arguments of one call by their names, in order.
Call = tuple[tuple[str, Argument], ...]
MODES = ("infer", "train")
# What every plan says of its problem, and every row of the plan database in a column.
PROBLEM_FIELDS: dict[str, type] = {
    "network": str,
    "graph": str,
    "arch": str,
    "batch": int,
    "dtype": str,
    "mode": str,
}
TYPE_FIELDS = {"shape", "dtype", "layout"}


@dataclass(frozen=True)
class Problem:
    """`graph` is the digest of the layers, and so of the tensors' types. `network` is a name
    for people, `batch` and `dtype` are those of the first tensor. `call` is None in plans from
    before it was kept.

    `order` holds the names of the graph's nodes as its digest numbers them: by it a plan is one for
    every network of these layers, whatever its own names are. Plans from before that
    have none, and are found by `earlier`, a digest with names in it.

    `precisions` are torch's settings for products of float32 on a GPU; there are none where no
    product is of float32, and in plans from before they were kept.
    """

    network: str
    graph: str
    arch: str
    batch: int
    dtype: str
    mode: str
    call: Call | None = None
    order: tuple[str, ...] = field(default=(), compare=False)
    earlier: str = field(default="", compare=False)
    precisions: Precisions = ()

    @staticmethod
    def of(graph: Graph, arch: str, network: str) -> Problem:
        """What a plan for the graph solves."""
        mode = "infer" if graph.backward_from is None else "train"
        batch, dtype = _batch_and_dtype(graph.inputs)
        return Problem(
            network,
            graph.digest,
            arch,
            batch,
            dtype,
            mode,
            graph.inputs,
            graph.structure.nodes,
            graph.named_digest,
            precisions_of(graph, arch),
        )

    @property
    def key(self) -> Problem:
        """Without the call, whose types are in the graph: plans from before it was kept match."""
        return replace(self, call=None, order=(), earlier="")

    def suits(self, asked: Problem) -> bool:
        """Whether its plan may run under the settings of the problem that is asked for."""
        return not (self.precisions and asked.precisions) or self.precisions == asked.precisions

    @property
    def layers(self) -> list[dict[str, Any]]:
        """What a plan must have to fit, whatever its network is called and its arch is: all of one
        of these.
        """
        others = {name: getattr(self, name) for name in ("batch", "dtype", "mode")}
        return [{"graph": graph, **others} for graph in (self.graph, self.earlier) if graph]

    @property
    def tensors(self) -> Named:
        """The tensors of the call; none if it was not kept."""
        return _tensors(self.call or ())

    @property
    def call_text(self) -> str:
        """Each argument in a few words: x 8x3x64x64 float32, scale 0.5."""
        return ", ".join(f"{name} {_argument_text(value)}" for name, value in self.call or ())

    def to_json(self) -> dict[str, Any]:
        """Without what was not kept of `call`, `order` and `precisions`."""
        data = {name: getattr(self, name) for name in PROBLEM_FIELDS}
        call = {} if self.call is None else {"call": _call_to_json(self.call)}
        lists = {name: [*getattr(self, name)] for name in ("order", "precisions")}
        return {**data, **call, **{name: kept for name, kept in lists.items() if kept}}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Problem:
        """The problem of fields whose types were checked; raises InvalidPlan."""
        call = _call_from_json(data["call"]) if "call" in data else None
        order = _names(data["order"]) if "order" in data else ()
        fields = {name: data[name] for name in PROBLEM_FIELDS}
        precisions = _precisions(data["precisions"]) if "precisions" in data else ()
        problem = Problem(**fields, call=call, order=order, precisions=precisions)
        if problem.mode not in MODES:
            raise InvalidPlan(f"mode: must be one of {', '.join(MODES)}, got {problem.mode!r}")
        if problem.batch < 1:
            raise InvalidPlan(f"batch: must be 1 or more, got {problem.batch}")
        if call is not None and _batch_and_dtype(call) != (problem.batch, problem.dtype):
            raise InvalidPlan(f"call: needs the batch and dtype of the plan, got {call!r:.80}")
        return problem

    def __str__(self) -> str:
        return f"{self.network}, batch {self.batch}, {self.mode}, {self.dtype}, {self.arch}"


def _tensors(call: Call) -> Named:
    return tuple((name, value) for name, value in call if isinstance(value, TensorType))


def _batch_and_dtype(call: Call) -> tuple[int, str]:
    """Of the first tensor: its first size, 1 of a scalar."""
    _, first = next(iter(_tensors(call)), ("", TensorType(())))
    return (*first.shape, 1)[0], first.dtype


def _argument_text(value: Argument) -> str:
    if not isinstance(value, TensorType):
        return repr(value)
    return f"{'x'.join(map(str, value.shape)) or 'scalar'} {value.dtype}"


def _call_to_json(call: Call) -> list[Any]:
    return [
        [name, value.to_json() if isinstance(value, TensorType) else value] for name, value in call
    ]


def _call_from_json(data: Any) -> Call:
    """Raises InvalidPlan for what `_call_to_json` would not write."""
    try:
        call = tuple((_name(name), _argument(value)) for name, value in data)
    except (TypeError, ValueError, InvalidGraph) as error:
        raise InvalidPlan(f"call: {error}") from error
    if len(dict(call)) < len(call) or not _tensors(call):
        raise InvalidPlan(f"call: must hold a tensor, and each name once, got {data!r:.80}")
    return call


def _names(data: Any) -> tuple[str, ...]:
    if not data or any(type(name) is not str for name in data) or len(set(data)) < len(data):
        raise InvalidPlan(f"order: must be names of nodes, each once, got {data!r:.80}")
    return tuple(data)


def _precisions(data: Any) -> Precisions:
    if len(data) != len(PRECISION_OF) or any(value not in PRECISIONS for value in data):
        raise InvalidPlan(
            f"precisions: must be {len(PRECISION_OF)} of {', '.join(PRECISIONS)}, got {data!r:.80}"
        )
    return tuple(data)


def _name(name: Any) -> str:
    if type(name) is not str:
        raise TypeError(f"an argument's name must be a text, got {name!r:.80}")
    return name


def _argument(value: Any) -> Argument:
    if value is None or type(value) in (bool, int, float, str):
        plain: Argument = value
        return plain
    if not isinstance(value, dict) or set(value) != TYPE_FIELDS or type(value["shape"]) is not list:
        raise TypeError(f"an argument must be a tensor's type or a plain value, got {value!r:.80}")
    return TensorType.from_json(value)
