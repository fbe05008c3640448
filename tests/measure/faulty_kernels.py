"""A kernel family for tests of the worker: each config misbehaves in its own way.

Workers load it through PLANTUNE_FAMILIES, as they would a user's.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from plantune.base.build_log import build_error
from plantune.base.canonical import Attrs
from plantune.devices.cuda.flags import float32_precisions
from plantune.graph.step import Step
from plantune.kernels.family import Binding, Frame, KernelFamily, Parts
from plantune.space.arch import Arch
from plantune.space.search_space import SearchSpace

IDLE_AFTER = 5


def _output(step: Step, frame: Frame) -> torch.Tensor:
    return frame.values[step.outputs[0][0]]


def _wrong(step: Step, frame: Frame) -> None:
    _output(step, frame).mul_(1.01)


def _segfault(step: Step, frame: Frame) -> None:
    ctypes.string_at(0)


def _abort(step: Step, frame: Frame) -> None:
    print("the reason is here", file=sys.stderr, flush=True)
    os.abort()


def _endless(step: Step, frame: Frame) -> None:
    while True:
        pass


def _endless_with_lock(step: Step, frame: Frame) -> None:
    """Never lets Python run, as a native library may."""
    ctypes.PyDLL(None).sleep(3600)


def _memory(step: Step, frame: Frame) -> None:
    kept = []
    while True:
        kept.append(torch.ones(1 << 24))


def _prints(step: Step, frame: Frame) -> None:
    print("{}" * 1000, flush=True)
    os.write(2, b"\0plt1" * 100)


def _garbage(step: Step, frame: Frame) -> None:
    os.write(int(sys.argv[2]), b"performance is great today\n" * 10)


def _closes(step: Step, frame: Frame) -> None:
    os.close(int(sys.argv[2]))
    time.sleep(3600)


def _exits(step: Step, frame: Frame) -> None:
    sys.exit(0)


def _generator_exits(step: Step, frame: Frame) -> None:
    raise GeneratorExit("a generator ended")


TWISTS: Mapping[str, Callable[[Step, Frame], None]] = {
    "none": lambda step, frame: None,
    "wrong": _wrong,
    "segfault": _segfault,
    "abort": _abort,
    "endless": _endless,
    "endless_with_lock": _endless_with_lock,
    "memory": _memory,
    "prints": _prints,
    "garbage": _garbage,
    "closes": _closes,
    "exits": _exits,
    "generator_exits": _generator_exits,
}
OTHERS = ("idle", "bug", "build_error", "build_endless", "build_memory", "settings")


class Faulty(KernelFamily[Parts]):
    """Config: `fault`, what goes wrong."""

    name: ClassVar = "faulty"
    arch_kinds = frozenset(("cpu",))

    def read(self, step: Step) -> Parts:
        return Parts(step)

    def configs(self, space: SearchSpace) -> tuple[Attrs, ...]:
        return tuple(Attrs(fault=fault) for fault in (*TWISTS, *OTHERS))

    def build(self, parts: Parts, config: Attrs, arch: Arch) -> Any:
        if config["fault"] == "build_error":
            raise build_error("g++ did not compile it", "kernel.cpp:1: error: expected ';'")
        if config["fault"] == "settings":
            raise build_error(f"float32: {' '.join(float32_precisions())}", "")
        if config["fault"] == "build_endless":
            time.sleep(3600)
        kept = []
        while config["fault"] == "build_memory":
            kept.append(bytearray(1 << 26))
        return None

    def bind(self, parts: Parts, config: Attrs, frame: Frame) -> Binding:
        step = parts.step
        if config["fault"] == "bug":
            raise KeyError("a mistake of whoever wrote this family")
        twist = TWISTS.get(config["fault"], TWISTS["none"])
        seen: Counter[tuple[int, int]] = Counter()

        def launch(stream: int) -> None:
            x = frame.values[step.inputs[0][0]]
            data = (x.data_ptr(), x._version)
            seen[data] += 1
            if config["fault"] == "idle" and seen[data] > IDLE_AFTER:
                return  # Fast, and nobody looks at the result any more.
            known = step.evaluate({name: frame.values[name] for name, _ in step.inputs})
            for name, _ in step.outputs:
                frame.values[name].copy_(known[name])
            twist(step, frame)

        return Binding(launch)


FAMILY = Faulty()
