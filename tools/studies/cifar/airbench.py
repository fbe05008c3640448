"""The network and the step of airbench94, Keller Jordan's record of training on CIFAR-10.

https://github.com/KellerJordan/cifar10-airbench (airbench94, with the batch of its later scripts).
Left out here are what does not change a step's work: looking ahead, freezing the first layer's
bias, turning images in every second epoch, and several views of a test image.
"""

from __future__ import annotations

import torch
from batches import Augment
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

BATCH, CLASSES = 2000, 10
EPOCHS = 8
AUGMENT = Augment((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), margin=2, mirrored=True)
SMOOTHING, OUTPUT_SCALE = 0.2, 1 / 9
# Rates per 1,024 images, apart from momentum, which makes a step 1 + 1 / (1 - momentum) as long.
RATE, MOMENTUM, DECAY, BIAS_RATE = 11.5, 0.85, 0.0153, 64.0
FIRST_PART, RISES_UNTIL, LAST_PART = 0.2, 0.23, 0.07


class _Norm(nn.BatchNorm2d):
    """Its scale stays one; it stays in float32."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-12, momentum=0.4)
        self.weight.requires_grad = False


class _Conv(nn.Conv2d):
    """Begins as the identity of as many channels as it reads."""

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__(channels, filters, 3, padding="same", bias=False)
        nn.init.dirac_(self.weight.data[:channels])


class _Group(nn.Module):
    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = _Conv(channels, filters), _Conv(filters, filters)
        self.pool = nn.MaxPool2d(2)
        self.norm1, self.norm2 = _Norm(filters), _Norm(filters)
        self.activation = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.norm1(self.pool(self.conv1(x))))
        return self.activation(self.norm2(self.conv2(x)))


class Airbench(nn.Module):
    """Patches of 2x2 pixels are whitened by filters that are not trained; three groups follow."""

    def __init__(self, widths: tuple[int, int, int] = (64, 256, 256)) -> None:
        super().__init__()
        self.whiten = nn.Conv2d(3, 24, 2)
        nn.init.zeros_(self.whiten.bias)
        self.whiten.weight.requires_grad = False
        self.activation = nn.GELU()
        channels = (24, *widths)
        self.groups = nn.Sequential(*map(_Group, channels, widths))
        self.pool = nn.MaxPool2d(3)
        self.head = nn.Linear(widths[-1], CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.groups(self.activation(self.whiten(x))))
        return self.head(x.flatten(1)) * OUTPUT_SCALE

    def whitened(self, images: Tensor, eps: float = 5e-4) -> None:
        """Takes the whitening filters, and their negatives, from the patches of these images."""
        patches = images.float().unfold(2, 2, 1).unfold(3, 2, 1)
        patches = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, 12).double()
        sizes, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
        filters = (vectors / (sizes + eps).sqrt()).T.reshape(12, 3, 2, 2)
        with torch.no_grad():
            self.whiten.weight.copy_(torch.cat((filters, -filters)))


def narrowed(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """In 16 bits, as the script trains it, but for its norms."""
    model.to(dtype)
    for module in model.modules():
        if isinstance(module, _Norm):
            module.float()
    return model


def loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """The sum: rates are per image."""
    return cross_entropy(outputs, labels, label_smoothing=SMOOTHING, reduction="none").sum()


def optimizer(model: nn.Module, *, fused: bool, capturable: bool) -> Optimizer:
    """torch's SGD can be captured as it is."""
    scale = 1024 * (1 + 1 / (1 - MOMENTUM))
    rate, decay = RATE / scale, DECAY * BATCH / scale
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    norms = [p for name, p in named if "norm" in name]
    others = [p for name, p in named if "norm" not in name]
    groups = [
        {"params": norms, "lr": rate * BIAS_RATE, "weight_decay": decay / (rate * BIAS_RATE)},
        {"params": others, "lr": rate, "weight_decay": decay / rate},
    ]
    return SGD(groups, rate, MOMENTUM, nesterov=True, fused=fused)


def part_of_rate(step: int, steps: int) -> float:
    """Up to the whole rate, then down."""
    rising = RISES_UNTIL * steps
    if step < rising:
        return FIRST_PART + (1 - FIRST_PART) * step / rising
    return 1 + (LAST_PART - 1) * (step - rising) / max(steps - rising, 1)
