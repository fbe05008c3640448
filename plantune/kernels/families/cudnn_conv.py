"""A convolution and its epilogue as one execution plan of cuDNN.

cuDNN offers plans per problem and machine, so no search space lists them: a config names one by its
engine and knobs, which mean the same in every process, and is checked against what is offered here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from plantune.canonical import Attrs
from plantune.cuda import cudnn
from plantune.errors import IllegalCandidate
from plantune.graph.step import Step
from plantune.kernels.constants import Constant, conv_weight, floats
from plantune.kernels.family import Binding, Frame, KernelFamily, images
from plantune.kernels.patterns.epilogue import ConvEpilogue, conv_epilogue
from plantune.layouts import aligned, view_bytes
from plantune.space.arch import Arch
from plantune.space.search_space import SearchSpace

# What a place further down in cuDNN's own order adds to a guess, as a part of it.
RANK_COST = 0.05
BYTES_PER_US = 4e6


class CudnnConv(KernelFamily):
    """Config: `plan`, the name of an execution plan."""

    name: ClassVar = "cudnn_conv"
    reads_channels_last: ClassVar = True
    arch_kinds = frozenset(("cuda",))
    launch_us = 2.0
    flops_per_us = 4e8

    def why_not_arch(self, arch: Arch) -> str | None:
        reason = super().why_not_arch(arch) or cudnn.why_not_here()
        if reason is None and arch.cuda is not None:
            here = torch.cuda.get_device_capability()
            if here != arch.cuda.compute_capability:
                reason = "cuDNN lists its plans on the GPU itself, and this one is sm{}{}".format(
                    *here
                )
        return reason

    def why_not_step(self, step: Step) -> str | None:
        try:
            problem = problem_of(step)
        except IllegalCandidate as reason:
            return str(reason)
        if problem.dtype not in cudnn.DTYPES:
            return f"cuDNN runs {', '.join(cudnn.DTYPES)}, not {problem.dtype}"
        if not all(problem.x + problem.y):
            return "cuDNN knows no empty images"
        return None

    def configs_for(self, step: Step, space: SearchSpace) -> tuple[Attrs, ...]:
        found = (Attrs(plan=name) for name in cudnn.conv_plans(problem_of(step)).names)
        return tuple(config for config in found if self.admits(config, space))

    def why_not_config(self, step: Step, config: Attrs, arch: Arch) -> str | None:
        plans = cudnn.conv_plans(problem_of(step))
        if config["plan"] in plans.names:
            return None
        return plans.why_none or f"cuDNN {cudnn.version()} does not offer this plan here"

    def layouts(self, step: Step, config: Attrs) -> Mapping[str, str]:
        return images(step, "nhwc")

    def workspace_bytes(self, step: Step, config: Attrs) -> int:
        """That of the plan, and room for images at addresses that the plan cannot read."""
        plan = cudnn.conv_plans(problem_of(step)).built(config["plan"])
        return aligned(plan.workspace_bytes) + sum(
            aligned(step.types[name].size_bytes) for name in set(_images(step).values())
        )

    def estimate_us(self, step: Step, config: Attrs) -> float:
        """Ever more in the order of cuDNN's own guesses.

        The fastest was among its first five for 11 of SE-ResNet9's convolutions (128 images, H200,
        2026-11-20), and up to 93 are offered.
        """
        names, plan = cudnn.conv_plans(problem_of(step)).names, config["plan"]
        rank = names.index(plan) if plan in names else len(names)
        work_us = self.flops(step) / self.flops_per_us + self.traffic_bytes(step) / BYTES_PER_US
        return (self.launch_us + work_us) * (1 + RANK_COST * rank)

    def build(self, step: Step, config: Attrs, arch: Arch) -> cudnn.ConvPlan:
        return cudnn.conv_plans(problem_of(step)).built(config["plan"])

    def bind(self, step: Step, config: Attrs, frame: Frame) -> Binding:
        values, epilogue = frame.values, conv_epilogue(step, unshifted=True)
        plan = cudnn.conv_plans(problem_of(step), frame.device.index).built(config["plan"])
        sources = _constants(epilogue)
        read = {word: _constant(step, word, name, frame) for word, name in sources.items()}
        images, places = _images(step), _places(step, plan.workspace_bytes, frame.workspace)
        outputs = {"y": step.nodes[-1].name, "unshifted": epilogue.unshifted}

        def launch(stream: int) -> None:
            given = {word: values[name] for word, name in images.items()}
            for word, image in given.items():
                if image.data_ptr() % cudnn.ALIGNMENT_BYTES:
                    with torch.cuda.stream(_stream(stream, frame.device)):
                        given[word] = places[images[word]].copy_(image)
            given |= {word: constant.tensor for word, constant in read.items()}
            given |= {word: values[name] for word, name in outputs.items() if name is not None}
            plan.launch(stream, given, frame.workspace)

        return Binding(launch, constants=tuple(read.values()))


def problem_of(step: Step) -> cudnn.ConvProblem:
    """The step as cuDNN is asked for it; raises IllegalCandidate with the reason."""
    epilogue = conv_epilogue(step, unshifted=True)
    (x, weight), attrs = epilogue.conv.inputs, epilogue.conv.attrs
    types = step.types

    def count(name: str | None) -> int:
        return 0 if name is None else types[name].numel

    return cudnn.ConvProblem(
        x=types[x].shape,
        weight=types[weight].shape,
        y=types[epilogue.conv.name].shape,
        dtype=types[x].dtype,
        stride=attrs["stride"],
        padding=attrs["padding"],
        dilation=attrs["dilation"],
        scale=count(epilogue.scale),
        bias=count(epilogue.bias),
        residual=epilogue.residual is not None,
        relu=epilogue.relu,
        offset=epilogue.offset is not None,
        unshifted=epilogue.unshifted is not None,
    )


def _constants(epilogue: ConvEpilogue) -> dict[str, str]:
    """What is packed at a refresh, by ConvProblem's words."""
    named = {word: getattr(epilogue, word) for word in ("scale", "bias", "offset")}
    present = {word: name for word, name in named.items() if name is not None}
    return {"weight": epilogue.conv.inputs[1], **present}


def _images(step: Step) -> dict[str, str]:
    """What is read at each launch, by ConvProblem's words."""
    epilogue = conv_epilogue(step, unshifted=True)
    x, residual = epilogue.conv.inputs[0], epilogue.residual
    return {"x": x} if residual is None else {"x": x, "residual": residual}


def _constant(step: Step, word: str, name: str, frame: Frame) -> Constant:
    """The weight as KRSC, anything else in float32."""
    if word != "weight":
        return floats(name, step.types[name].numel, frame)
    return conv_weight(step, name, frame)


def _places(step: Step, start: int, workspace: Tensor | None) -> dict[str, Tensor]:
    """Where in the workspace, after the plan's part, each image can be moved to."""
    places = {}
    for name in dict.fromkeys(_images(step).values()):
        assert workspace is not None
        start = aligned(start)
        places[name] = view_bytes(workspace, start, step.types[name], "nhwc")
        start += step.types[name].size_bytes
    return places


def _stream(handle: int, device: torch.device) -> torch.cuda.Stream:
    # torch takes 0 for a stream of its own choice.
    return (
        torch.cuda.ExternalStream(handle, device) if handle else torch.cuda.default_stream(device)
    )


FAMILY = CudnnConv()
