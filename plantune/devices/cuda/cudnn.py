"""Convolutions with an epilogue as one operation graph of cuDNN: the one file that knows it.

The package `nvidia-cudnn-frontend` is imported when a plan is asked for, never before. cuDNN says
only on the GPU itself which execution plans it offers, so they are listed there, for each problem.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plantune.base.blobs import read_blob, write_blob
from plantune.base.canonical import digest
from plantune.base.paths import cache_file
from plantune.devices.cuda.flags import float32_precisions
from plantune.errors import BuildError, CudaError, IllegalCandidate

# Addresses that a plan takes are multiples of this.
ALIGNMENT_BYTES = 16
DTYPES = {"float16": "HALF", "bfloat16": "BFLOAT16", "float32": "FLOAT"}
# What no plan may do: differ from run to run, or round more than the framework does.
REFUSED_NOTES = ("NONDETERMINISTIC", "REDUCED_PRECISION_REDUCTION", "DOWN_CONVERT_INPUTS")
# Engines that compile take 0.2 to 15 s, to read that again 7 ms (H200, 2026-11-20).
WORTH_KEEPING_S = 0.05
# ConvProblem's words for its tensors.
WORDS = ("x", "weight", "scale", "bias", "residual", "offset", "unshifted", "y")

Shape = tuple[int, ...]
# Handles, graphs and plans serve one thread at a time.
_lock = threading.RLock()


@dataclass(frozen=True)
class ConvProblem:
    """y = relu(conv(x, weight) * scale + bias + residual) + offset on images in NHWC.

    `scale` and `bias` are how many values they have: none, one, or one per channel. With
    `unshifted` the value before the offset is an output too. Scale, bias and offset are float32,
    all else is of `dtype`, the weight in KRSC.
    """

    x: Shape
    weight: Shape
    y: Shape
    dtype: str
    stride: Shape
    padding: Shape
    dilation: Shape
    scale: int = 0
    bias: int = 0
    residual: bool = False
    relu: bool = False
    offset: bool = False
    unshifted: bool = False


@dataclass(frozen=True)
class ConvPlan:
    """A built execution plan."""

    graph: Any
    index: int
    device: int
    workspace_bytes: int

    def launch(self, stream: int, tensors: Mapping[str, Tensor], workspace: Tensor | None) -> None:
        """Launches on a stream; `tensors` are named by ConvProblem's words."""
        addresses = {_number(word): tensor.data_ptr() for word, tensor in tensors.items()}
        scratch = 0 if workspace is None else workspace.data_ptr()
        with _lock:
            handle = _handle(self.device)
            try:
                _library().set_stream(handle=handle, stream=stream)
                self.graph.execute_plan_at_index(addresses, scratch, self.index, handle)
            except _refusals() as error:
                raise CudaError(f"cuDNN did not launch its plan: {_brief(error)}") from error


class ConvPlans:
    """The execution plans that cuDNN offers for a problem on one GPU; `why_none` if there is none.

    They are listed when this is made, which launches nothing.
    """

    def __init__(self, problem: ConvProblem, device: int, *, tf32: bool) -> None:
        self.why_none = ""
        self._device = device
        self._indices: dict[str, int] = {}
        self._built: dict[str, ConvPlan] = {}
        library = _library()
        # All that a built plan depends on.
        self._key = [asdict(problem), tf32, library.__version__, version(), _chip(device)]
        with _lock, torch.cuda.device(device):
            self._graph = _graph(problem, _handle(device))
            try:
                self._graph.validate()
                self._graph.build_operation_graph()
                modes = library.heur_mode
                self._graph.create_execution_plans([modes.A, modes.B, modes.FALLBACK])
            except _refusals() as error:
                self.why_none = f"cuDNN {version()} offers no plan for it: {_brief(error)}"
                return
            refused = REFUSED_NOTES if tf32 else (*REFUSED_NOTES, "TENSOR_CORE")
            notes = [getattr(library.numerical_note, note) for note in refused]
            self._graph.deselect_numeric_notes(notes)
            for index in range(self._graph.get_execution_plan_count()):
                self._indices.setdefault(self._graph.get_plan_name_at_index(index), index)

    @property
    def names(self) -> tuple[str, ...]:
        """The plans by their engines and knobs, those that cuDNN takes for faster first."""
        return tuple(self._indices)

    def built(self, name: str) -> ConvPlan:
        """The plan of that name, built once. Raises IllegalCandidate if cuDNN does not offer it
        and BuildError if it does not build.
        """
        if name not in self._indices:
            raise IllegalCandidate(self.why_none or f"cuDNN {version()} does not offer {name!r}")
        with _lock, torch.cuda.device(self._device):
            if name not in self._built:
                kept = ("cudnn", f"{digest([*self._key, name])}.plan")
                made = self._restored(cache_file(*kept))
                self._built[name] = made or self._compiled(name, kept)
            return self._built[name]

    def _restored(self, place: Path) -> ConvPlan | None:
        """The plan that was kept there, if cuDNN takes it."""
        content = read_blob(place)
        if content is None:
            return None
        handle = _handle(self._device)
        try:
            graph = _library().pygraph(handle=handle)
            # Numbers, as `serialize` gives them: releases before 1.29 take no bytes.
            graph.deserialize(handle, list(content))
            return self._plan(graph, 0)
        except _refusals():
            return None

    def _compiled(self, name: str, kept: tuple[str, str]) -> ConvPlan:
        started, index = time.monotonic(), self._indices[name]
        try:
            self._graph.build_plan_at_index(index)
            plan = self._plan(self._graph, index)
        except _refusals() as error:
            raise BuildError(f"cuDNN did not build {name}: {_brief(error)}", str(error)) from error
        if time.monotonic() - started > WORTH_KEEPING_S:
            with suppress(OSError):  # a full disk costs time in the next process
                write_blob(cache_file(*kept, to_write=True), bytes(self._graph.serialize()))
        return plan

    def _plan(self, graph: Any, index: int) -> ConvPlan:
        size = graph.get_workspace_size_plan_at_index(index)
        return ConvPlan(graph, index, self._device, size)


def conv_plans(problem: ConvProblem, device: int | None = None) -> ConvPlans:
    """The plans for a problem on a GPU, the current one by default; listed once in a process.

    Products of float32 may be rounded to TF32 where torch allows it.
    """
    device = torch.cuda.current_device() if device is None else device
    tf32 = problem.dtype != "float32" or float32_precisions()[0] == "tf32"
    with _lock:
        return _conv_plans(problem, device, tf32)


@cache
def _conv_plans(problem: ConvProblem, device: int, tf32: bool) -> ConvPlans:
    return ConvPlans(problem, device, tf32=tf32)


@cache
def why_not_here() -> str | None:
    """Why cuDNN's plans cannot be listed in this process, or None if they can."""
    if importlib.util.find_spec("cudnn") is None:
        return "nvidia-cudnn-frontend is not installed: pip install 'plantune[cudnn]'"
    if not torch.cuda.is_available():
        return "cuDNN lists its plans on the GPU itself, and there is none here"
    try:
        version()
    except (ImportError, RuntimeError) as error:
        return f"cuDNN does not load: {_brief(error)}"
    return None


@cache
def version() -> str:
    """cuDNN's own version."""
    return str(_library().backend_version_string())


@cache
def _chip(device: int) -> str:
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} {properties.multi_processor_count}"


@cache
def _library() -> Any:
    return importlib.import_module("cudnn")


@cache
def _handle(device: int) -> Any:
    with torch.cuda.device(device):
        return _library().create_handle()


def _refusals() -> tuple[type[Exception], ...]:
    """What the library raises if it refuses something."""
    # From 1.27 on a plan that was deselected is a ValueError.
    return (_library().cudnnGraphNotSupportedError, RuntimeError, ValueError)


def _number(word: str) -> int:
    """What the graph calls a tensor; small numbers are its own."""
    return WORDS.index(word) + 1000


def _graph(problem: ConvProblem, handle: Any) -> Any:
    """The operation graph of a problem, in float32 between its operations."""
    library = _library()
    float32 = library.data_type.FLOAT
    dtype = getattr(library.data_type, DTYPES[problem.dtype])
    graph = library.pygraph(
        io_data_type=dtype,
        intermediate_data_type=float32,
        compute_data_type=float32,
        handle=handle,
    )

    def given(word: str, shape: Shape, of: Any = dtype) -> Any:
        where = {"dim": list(shape), "stride": nhwc_strides(shape), "uid": _number(word)}
        return graph.tensor(name=word, data_type=of, **where)

    def constant(word: str, values: int) -> Any:
        return given(word, (1, values, 1, 1), float32)

    def leaves(word: str, value: Any) -> None:
        value.set_output(True).set_data_type(dtype).set_uid(_number(word))
        value.set_dim(list(problem.y)).set_stride(nhwc_strides(problem.y))

    value = graph.conv_fprop(
        given("x", problem.x),
        given("weight", problem.weight),
        padding=list(problem.padding),
        stride=list(problem.stride),
        dilation=list(problem.dilation),
    )
    if problem.scale:
        value = graph.mul(value, constant("scale", problem.scale))
    if problem.bias:
        value = graph.add(value, constant("bias", problem.bias))
    if problem.residual:
        value = graph.add(value, given("residual", problem.y))
    if problem.relu:
        # It keeps NaN: the package asks cuDNN for that.
        value = graph.relu(value)
    if problem.unshifted:
        leaves("unshifted", value)
    if problem.offset:
        value = graph.add(value, constant("offset", 1))
    leaves("y", value)
    return graph


def nhwc_strides(shape: Shape) -> list[int]:
    """Strides of an image or a weight that is stored with its channels last."""
    _, c, h, w = shape
    return [c * h * w, 1, c * w, c]


def _brief(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:300] or type(error).__name__
