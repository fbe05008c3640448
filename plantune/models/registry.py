"""The reference networks by name. Names and shapes are known without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, cast

from plantune.base.nearest import did_you_mean
from plantune.errors import UnknownNetwork

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class NetworkSpec:
    """A reference network: where its builder is and which images it takes."""

    name: str
    description: str
    builder: str
    """`module:function`; the function takes `in_channels` by name."""
    image_size: int
    """Height and width of an input image."""

    def build(self, in_channels: int = 3) -> nn.Module:
        """A freshly initialised network on the CPU, in training mode."""
        module, function = self.builder.split(":")
        return cast("nn.Module", getattr(import_module(module), function)(in_channels=in_channels))

    def input_shape(self, batch: int, in_channels: int = 3) -> tuple[int, int, int, int]:
        """The input's (N, C, H, W)."""
        return (batch, in_channels, self.image_size, self.image_size)


_NETWORKS = {
    name: NetworkSpec(name, description, f"plantune.models.{module}:{name}", size)
    for name, description, module, size in (
        (
            "se_resnet9_fixup",
            "SE-ResNet9 with Fixup biases, vision of large-batch RL agents",
            "se_resnet9",
            64,
        ),
        ("resnet18", "ResNet-18, as in torchvision", "resnet", 224),
        ("resnet34", "ResNet-34, as in torchvision", "resnet", 224),
        (
            "resnet50",
            "ResNet-50, as in torchvision (stride on the 3x3 convolution)",
            "resnet",
            224,
        ),
    )
}


def network_names() -> tuple[str, ...]:
    """The names that `network` knows, sorted."""
    return tuple(sorted(_NETWORKS))


def network(name: str) -> NetworkSpec:
    """The reference network of this name; raises UnknownNetwork for any other."""
    if name not in _NETWORKS:
        raise UnknownNetwork(_unknown_message(name))
    return _NETWORKS[name]


def _unknown_message(name: str) -> str:
    hint = did_you_mean(name, network_names())
    hint = f"{hint} " if hint else ""
    return f"unknown network {name!r}: {hint}known networks are {', '.join(network_names())}"
