"""A whole step as one function through torch's inductor: C++ compiled for this machine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from plantune.base.build_log import build_error, first_error
from plantune.devices.device import first_line
from plantune.devices.host import NO_COMPILER, cxx_compiler
from plantune.graph import Step
from plantune.graph.free_casts import rounding_casts
from plantune.graph.layouts import in_layout, view_bytes
from plantune.kernels.family import Arch, Attrs, Binding, Frame, KernelFamily, Parts, images, refuse

# They compute nothing, so their compiled result may be a view of the step's input.
MOVES = ("reshape", "permute", "broadcast_to", "space_to_depth", "depth_to_space")
Compiled = Callable[..., Sequence[Tensor]]


class Inductor(KernelFamily[Parts]):
    """Config: `layout` of images."""

    name: ClassVar = "inductor"
    arch_kinds = frozenset(("cpu",))
    build_s = 4.0

    def why_not_arch(self, arch: Arch) -> str | None:
        if cxx_compiler() is None:
            return NO_COMPILER
        return super().why_not_arch(arch)

    def read(self, step: Step) -> Parts:
        refuse(
            {
                "one op alone is the framework's already": len(step.nodes) == 1,
                "the step computes nothing": all(op in MOVES for op in step.ops),
                "it draws other random numbers": step.draws,
                # x - x.bfloat16().float() is zero there (torch 2.13, on a CPU).
                "it leaves out casts of the user's code": rounding_casts(step),
            }
        )
        return Parts(step)

    def layouts(self, parts: Parts, config: Attrs) -> Mapping[str, str]:
        step = parts.step
        # The compiled code takes the strides that it was traced with, those of weights too.
        weights = {name: "nchw" for name in step.constants if len(step.types[name].shape) == 4}
        return {**weights, **images(step, config["layout"])}

    def adopts(self, parts: Parts, config: Attrs) -> frozenset[str]:
        return frozenset(name for name, _ in parts.step.outputs)

    def build(self, parts: Parts, config: Attrs, arch: Arch) -> Any:
        """Traces the step on empty inputs and compiles it, some seconds each."""
        step, layouts = parts.step, self.layouts(parts, config)
        examples = [
            view_bytes(
                torch.zeros(max(type_.size_bytes, 1), dtype=torch.uint8),
                0,
                type_,
                layouts.get(name, "nchw"),
            )
            for name, type_ in step.inputs
        ]
        try:
            with torch.no_grad(), warnings.catch_warnings():
                # Of torch's own code; a user can do nothing about them.
                warnings.simplefilter("ignore", DeprecationWarning)
                from torch._inductor import compile as compile_graph
                from torch.fx.experimental.proxy_tensor import make_fx

                traced = make_fx(_function(step, layouts))(*examples)
                return compile_graph(traced, list(examples), options={"compile_threads": 1})
        except Exception as error:
            what = f"inductor did not compile step {step.name!r}"
            if not first_error(str(error)):
                what += f": {first_line(error)}"
            raise build_error(what, str(error)) from error

    def bind(self, parts: Parts, config: Attrs, frame: Frame) -> Binding:
        values, run = frame.values, frame.built
        inputs = [name for name, _ in parts.step.inputs]
        outputs = [name for name, _ in parts.step.outputs]

        def launch(stream: int) -> None:
            values.update(zip(outputs, run(*[values[name] for name in inputs]), strict=True))

        return Binding(launch)


def _function(step: Step, layouts: Mapping[str, str]) -> Compiled:
    """The step as a function of its inputs; its results share no memory with them."""
    names = [name for name, _ in step.inputs]
    moved = {node.name for node in step.nodes if node.op in MOVES}

    def function(*inputs: Tensor) -> tuple[Tensor, ...]:
        known = step.evaluate(dict(zip(names, inputs, strict=True)))
        results = []
        for name, _ in step.outputs:
            result = known[name].clone() if name in moved else known[name]
            results.append(in_layout(result, layouts.get(name, "nchw")))
        return tuple(results)

    return function


FAMILY = Inductor()
