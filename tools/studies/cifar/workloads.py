"""What is trained: a network with its loss, optimizer, rates and batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import airbench
import torch
from batches import Augment
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam, Optimizer

from plantune.models.resnet import resnet18, resnet50

RATE = 1e-3
AUGMENT = Augment((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))


@dataclass(frozen=True)
class Workload:
    """`narrow` brings a network to 16 bits that needs no autocast; `prepare` sees images first."""

    name: str
    classes: int
    batch: int
    epochs: int
    augment: Augment
    build: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[..., Optimizer]
    part_of_rate: Callable[[int, int], float]
    narrow: Callable[[nn.Module, torch.dtype], nn.Module] | None = None
    prepare: Callable[[nn.Module, Tensor], None] | None = None
    other_classes: Mapping[int, Callable[[], nn.Module]] = field(default_factory=dict)

    def for_classes(self, classes: int) -> Workload:
        if classes == self.classes:
            return self
        return replace(self, classes=classes, build=self.other_classes[classes])


def _adam(model: nn.Module, *, fused: bool, capturable: bool) -> Optimizer:
    return Adam(model.parameters(), RATE, fused=fused, capturable=capturable)


def _falling(step: int, steps: int) -> float:
    """To nothing, so that accuracies in the end do not depend on the last batches."""
    return 1 - step / max(steps, 1)


def _whiten(model: nn.Module, images: Tensor) -> None:
    assert isinstance(model, airbench.Airbench)
    model.whitened(images)


def _resnet(name: str, build: Callable[..., nn.Module], batch: int, *classes: int) -> Workload:
    """Of the first number of classes, unless the images have another one of these."""
    made = {count: partial(build, num_classes=count) for count in classes}
    first = classes[0]
    return Workload(
        *(name, first, batch, 1, AUGMENT, made.pop(first), cross_entropy, _adam, _falling),
        other_classes=made,
    )


def _airbench(name: str, build: Callable[..., nn.Module], batch: int) -> Workload:
    return Workload(
        *(name, airbench.CLASSES, batch, airbench.EPOCHS, airbench.AUGMENT, build),
        *(airbench.loss, airbench.optimizer, airbench.part_of_rate),
        narrow=airbench.narrowed,
        prepare=_whiten,
    )


WORKLOADS = {
    "resnet50": _resnet("resnet50", resnet50, 128, 100),
    "airbench94": _airbench("airbench94", airbench.Airbench, airbench.BATCH),
}
# What two cores train in a minute.
SMALL = {
    "resnet50": _resnet("resnet18", resnet18, 16, 10, 100),
    "airbench94": _airbench("airbench94", partial(airbench.Airbench, (8, 16, 16)), 50),
}


def load_weights(model: nn.Module, path: Path) -> list[str]:
    """Takes a checkpoint's weights, as torchvision saves them; the names of those that do not fit
    are returned, such as the last layer's for another number of classes.
    """
    held = torch.load(path, map_location="cpu", weights_only=True)
    own = model.state_dict()
    fits = {n: w for n, w in held.items() if n in own and own[n].shape == w.shape}
    model.load_state_dict(fits, strict=False)
    return [name for name in own if name not in fits]


def save_weights(model: nn.Module, path: Path) -> None:
    """For `load_state_dict` of torchvision's network of that name, with `weights_only=True`."""
    state = {
        name: tensor.detach().cpu().contiguous().clone()
        for name, tensor in model.state_dict().items()
    }
    torch.save(state, path)
