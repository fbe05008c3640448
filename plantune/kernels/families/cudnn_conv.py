"""A convolution and its epilogue as one execution plan of cuDNN.

cuDNN offers plans per problem and machine, so no search space lists them: a config names one by its
engine and knobs, which mean the same in every process, and is checked against what is offered here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from plantune.devices.cuda import cudnn
from plantune.graph import Step
from plantune.graph.layouts import aligned, view_bytes
from plantune.kernels.family import Arch, Attrs, Binding, Frame, KernelFamily, SearchSpace, refuse
from plantune.kernels.patterns.epilogue import ConvParts, conv_epilogue
from plantune.kernels.weights.constants import Arrangement, Constants, conv_weight, floats


@dataclass(frozen=True)
class CudnnParts(ConvParts):
    """A convolution by cuDNN's words."""

    @cached_property
    def problem(self) -> cudnn.ConvProblem:
        """The step as cuDNN is asked for it."""
        epilogue, types = self.epilogue, self.step.types
        (x, weight), attrs = self.conv.inputs, self.conv.attrs

        def count(name: str | None) -> int:
            return 0 if name is None else types[name].numel

        return cudnn.ConvProblem(
            x=types[x].shape,
            weight=types[weight].shape,
            y=types[self.conv.name].shape,
            dtype=types[x].dtype,
            stride=attrs["stride"],
            padding=attrs["padding"],
            dilation=attrs["dilation"],
            scale=count(epilogue.scale),
            bias=count(epilogue.bias),
            residual=epilogue.residual is not None,
            relu="relu" in epilogue.chain,
            offset=epilogue.offset is not None,
            unshifted=epilogue.unshifted is not None,
        )

    @property
    def images(self) -> dict[str, str]:
        """What is read at each launch."""
        residual = self.epilogue.residual
        return {"x": self.x} if residual is None else {"x": self.x, "residual": residual}

    @property
    def constants(self) -> dict[str, tuple[str | None, Arrangement]]:
        """The weight as KRSC, anything else in float32."""
        types, epilogue = self.step.types, self.epilogue
        vectors = {"scale": epilogue.scale, "bias": epilogue.bias, "offset": epilogue.offset}
        return {
            "weight": (self.weight, conv_weight(types[self.weight])),
            **{
                word: (name, floats(types[name].numel))
                for word, name in vectors.items()
                if name is not None
            },
        }


class CudnnConv(KernelFamily[CudnnParts]):
    """Config: `plan`, the name of an execution plan."""

    name: ClassVar = "cudnn_conv"
    reads_channels_last: ClassVar = True
    image_layout = "nhwc"
    arch_kinds = frozenset(("cuda",))

    def why_not_arch(self, arch: Arch) -> str | None:
        reason = super().why_not_arch(arch) or cudnn.why_not_here()
        if reason is None and arch.cuda is not None:
            here = torch.cuda.get_device_capability()
            if here != arch.cuda.compute_capability:
                reason = "cuDNN lists its plans on the GPU itself, and this one is sm{}{}".format(
                    *here
                )
        return reason

    def read(self, step: Step) -> CudnnParts:
        parts = CudnnParts(step, conv_epilogue(step, unshifted=True))
        problem, function = parts.problem, parts.epilogue.only_function()
        known = ", ".join(cudnn.DTYPES)
        refuse(
            {
                f"cuDNN runs {known}, not {problem.dtype}": problem.dtype not in cudnn.DTYPES,
                f"cuDNN is asked for relu alone, not for {function}": function
                not in (None, "relu"),
                "cuDNN knows no empty images": not all(problem.x + problem.y),
            }
        )
        return parts

    def configs_for(self, parts: CudnnParts, space: SearchSpace) -> tuple[Attrs, ...]:
        found = (Attrs(plan=name) for name in cudnn.conv_plans(parts.problem).names)
        return tuple(config for config in found if self.admits(config, space))

    def why_not_config(self, parts: CudnnParts, config: Attrs, arch: Arch) -> str | None:
        plans = cudnn.conv_plans(parts.problem)
        if config["plan"] in plans.names:
            return None
        return plans.why_none or f"cuDNN {cudnn.version()} does not offer this plan here"

    def workspace_bytes(self, parts: CudnnParts, config: Attrs) -> int:
        """The plan's workspace, and room for images at addresses that the plan cannot read."""
        plan = cudnn.conv_plans(parts.problem).built(config["plan"])
        return aligned(plan.workspace_bytes) + sum(
            aligned(parts.step.types[name].size_bytes) for name in set(parts.images.values())
        )

    def estimate_us(self, parts: CudnnParts, config: Attrs, arch: Arch) -> float:
        """Ever more in the order of cuDNN's own guesses.

        The fastest was among its first five for 11 of SE-ResNet9's convolutions (128 images, H200,
        2026-11-20), and up to 93 are offered.
        """
        names, plan = cudnn.conv_plans(parts.problem).names, config["plan"]
        rank = names.index(plan) if plan in names else len(names)
        return super().estimate_us(parts, config, arch) * (1 + arch.cost(self.name)["rank"] * rank)

    def build(self, parts: CudnnParts, config: Attrs, arch: Arch) -> cudnn.ConvPlan:
        return cudnn.conv_plans(parts.problem).built(config["plan"])

    def bind(self, parts: CudnnParts, config: Attrs, frame: Frame) -> Binding:
        values, images = frame.values, parts.images
        plan = cudnn.conv_plans(parts.problem, frame.device.index).built(config["plan"])
        constants = Constants(frame, parts.constants)
        places = _places(parts, plan.workspace_bytes, frame.workspace)
        outputs = {"y": parts.y, "unshifted": parts.epilogue.unshifted}

        def launch(stream: int) -> None:
            given = {word: values[name] for word, name in images.items()}
            for word, image in given.items():
                if image.data_ptr() % cudnn.ALIGNMENT_BYTES:
                    with torch.cuda.stream(_stream(stream, frame.device)):
                        given[word] = places[images[word]].copy_(image)
            given |= constants.tensors()
            given |= {word: values[name] for word, name in outputs.items() if name is not None}
            plan.launch(stream, given, frame.workspace)

        return Binding(launch, constants=constants.all)


def _places(parts: CudnnParts, start: int, workspace: Tensor | None) -> dict[str, Tensor]:
    """Where in the workspace, after the plan's part, each image can be moved to."""
    places = {}
    for name in dict.fromkeys(parts.images.values()):
        assert workspace is not None
        start, type_ = aligned(start), parts.step.types[name]
        places[name] = view_bytes(workspace, start, type_, "nhwc")
        start += type_.size_bytes
    return places


def _stream(handle: int, device: torch.device) -> torch.cuda.Stream:
    # torch takes 0 for a stream of its own choice.
    return (
        torch.cuda.ExternalStream(handle, device) if handle else torch.cuda.default_stream(device)
    )


FAMILY = CudnnConv()
