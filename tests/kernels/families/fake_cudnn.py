"""A library that computes on the CPU what cuDNN's graphs would compute on a GPU."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from plantune.devices.cuda import cudnn
from plantune.graph.types import DTYPES


class Refusal(Exception):
    """What the library raises where it has no kernel."""


class FakeTensor(SimpleNamespace):
    """A value of a graph; `compute` makes it from the memory that a launch was given."""

    def set_output(self, leaves: bool) -> FakeTensor:
        self.leaves = leaves
        return self

    def set_data_type(self, dtype: str) -> FakeTensor:
        self.dtype = dtype
        return self

    def set_uid(self, uid: int) -> FakeTensor:
        self.uid = uid
        return self

    def set_dim(self, dim: list[int]) -> FakeTensor:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> FakeTensor:
        self.stride = stride
        return self


class FakeGraph:
    """Stands for cuDNN's graph: it computes on the CPU what was built, from bare addresses."""

    plans = ("eng1_k2=3", "eng2", "eng1_k2=3", "backend_heuristics", "eng7_k1=1")

    def __init__(self, made: list[FakeGraph], types: dict[str, Any]) -> None:
        self.made = made
        if len(types) > 1:
            assert types["intermediate_data_type"] == types["compute_data_type"] == "float32"
        self.outputs: list[FakeTensor] = []
        self.built: list[int] = []
        self.notes: list[str] = []
        self.launched: list[tuple[int, int]] = []

    def tensor(self, name: str, data_type: str, dim: Any, stride: Any, uid: int) -> FakeTensor:
        given = FakeTensor(dtype=data_type, dim=dim, stride=stride, uid=uid)
        given.compute = lambda memory: in_memory(memory[uid], given).float()
        return given

    def _op(self, function: Callable[..., Tensor], *inputs: FakeTensor) -> FakeTensor:
        value = FakeTensor(leaves=False)
        value.compute = lambda memory: function(*(one.compute(memory) for one in inputs))
        self.outputs.append(value)
        return value

    def conv_fprop(self, x: FakeTensor, w: FakeTensor, **geometry: list[int]) -> FakeTensor:
        groups = x.dim[1] // w.dim[1]
        return self._op(lambda a, b: torch.conv2d(a, b, groups=groups, **geometry), x, w)

    def mul(self, a: FakeTensor, b: FakeTensor) -> FakeTensor:
        return self._op(torch.mul, a, b)

    def add(self, a: FakeTensor, b: FakeTensor) -> FakeTensor:
        return self._op(torch.add, a, b)

    def relu(self, a: FakeTensor) -> FakeTensor:
        return self._op(torch.relu, a)

    def validate(self) -> None:
        pass

    def build_operation_graph(self) -> None:
        pass

    def create_execution_plans(self, modes: list[str]) -> None:
        if not self.plans:
            raise Refusal("[cudnn_frontend] Error: no engine\n for such a graph")

    def deselect_numeric_notes(self, notes: list[str]) -> None:
        self.notes += notes

    def get_execution_plan_count(self) -> int:
        return len(self.plans)

    def get_plan_name_at_index(self, index: int) -> str:
        return self.plans[index]

    def build_plan_at_index(self, index: int) -> None:
        if self.plans[index] == "eng7_k1=1":
            raise RuntimeError("it wants more shared memory than there is")
        self.built.append(index)

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        assert index in self.built
        return 300

    def serialize(self) -> list[int]:
        return list(f"{id(self)} {self.built[-1]}".encode())

    def deserialize(self, handle: Any, content: list[int]) -> None:
        number, index = map(int, bytes(content).split())
        (source,) = (graph for graph in self.made if id(graph) == number)
        self.plans = (source.plans[index],)
        self.outputs, self.built = source.outputs, [0]

    def execute_plan_at_index(
        self, memory: dict[int, int], workspace: int, index: int, handle: Any
    ) -> None:
        assert index in self.built
        assert workspace
        assert all(address % cudnn.ALIGNMENT_BYTES == 0 for address in memory.values())
        self.launched.append((index, handle.stream))
        for value in self.outputs:
            if value.leaves:
                in_memory(memory[value.uid], value).copy_(value.compute(memory))


def in_memory(address: int, tensor: FakeTensor) -> Tensor:
    """The tensor at an address."""
    dtype = DTYPES[tensor.dtype]
    raw = (ctypes.c_char * (math.prod(tensor.dim) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype).as_strided(tensor.dim, tensor.stride)


class Words:
    """An enumeration whose values are their names."""

    def __getattr__(self, name: str) -> str:
        return {"HALF": "float16", "BFLOAT16": "bfloat16", "FLOAT": "float32"}.get(name, name)
