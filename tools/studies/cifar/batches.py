"""Batches of images that are cut out at random, turned and normalised: the same ones for all ways.

Where each image of an epoch is cut out follows from the seed and the epoch's number. On a GPU the
images stay there as bytes, and those of many batches are made at once by a few operators: with some
64 batches to share them, their launches cost next to nothing, and no kernel of its own could cost
less than the one launch that it would need in every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from images import SIDE, Images
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader, Dataset

IMAGES_AT_ONCE = 8192
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Augment:
    """Images are cut out of ones with `margin` more pixels on each side, half of them turned."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    margin: int = 4
    mirrored: bool = False  # the margin shows the image; else it is black

    @property
    def places(self) -> int:
        """Ways to cut out and turn an image."""
        return 2 * (2 * self.margin + 1) ** 2


class Cutter:
    """Makes images for a network out of bytes, on the device of these."""

    def __init__(self, images: Images, augment: Augment, device: torch.device) -> None:
        self._augment = augment
        wide = _widened(images.pixels, augment).permute(0, 2, 3, 1).contiguous()
        self._wide, self.labels = wide.to(device), images.labels.to(device)
        self._sides = torch.arange(SIDE, device=device)
        # x / 255 normalised is x * scale + shift.
        mean, std = (torch.tensor(x, device=device) for x in (augment.mean, augment.std))
        self._scale, self._shift = 1 / (255 * std), -mean / std

    def cut(self, numbers: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
        """The images of these numbers, each in its place of `Augment.places`, in channels_last."""
        across = 2 * self._augment.margin + 1
        turned, place = places % 2, places // 2
        rows = (place // across)[:, None] + self._sides
        left = (place % across)[:, None]
        columns = left + torch.where(turned[:, None] == 1, SIDE - 1 - self._sides, self._sides)
        pixels = self._wide[numbers[:, None, None], rows[:, :, None], columns[:, None, :]]
        return self._normalised(pixels, dtype)

    def whole(self, numbers: slice, dtype: torch.dtype) -> Tensor:
        """Images as they are, to test a network on."""
        inside = slice(self._augment.margin, self._augment.margin + SIDE)
        return self._normalised(self._wide[numbers, inside, inside], dtype)

    def _normalised(self, pixels: Tensor, dtype: torch.dtype) -> Tensor:
        scale, shift = self._scale.to(dtype), self._shift.to(dtype)
        return torch.addcmul(shift, pixels.to(dtype), scale).permute(0, 3, 1, 2)


def _widened(pixels: Tensor, augment: Augment) -> Tensor:
    margins = (augment.margin,) * 4
    if not augment.mirrored:
        return pad(pixels, margins)
    # Of bytes torch has no such margin.
    parts = (pad(part.float(), margins, "reflect").byte() for part in pixels.split(5_000))
    return torch.cat([*parts])


@dataclass(frozen=True)
class Epoch:
    """Which images come in which order, and where each is cut out."""

    order: Tensor
    places: Tensor
    batch: int

    @classmethod
    def drawn(cls, seed: int, number: int, images: int, augment: Augment, batch: int) -> Epoch:
        random = torch.Generator().manual_seed(seed * 10_007 + number)
        order = torch.randperm(images, generator=random)
        return cls(order, torch.randint(augment.places, (images,), generator=random), batch)

    def __len__(self) -> int:
        """Batches; the last one may be smaller."""
        return len(self.order.split(self.batch))

    def to(self, device: torch.device) -> Epoch:
        return Epoch(self.order.to(device), self.places.to(device), self.batch)


def on_device(cutter: Cutter, epoch: Epoch, dtype: torch.dtype) -> Iterator[Batch]:
    """The batches of an epoch that is where the cutter is."""
    many = max(IMAGES_AT_ONCE // epoch.batch, 1) * epoch.batch
    for order, places in zip(epoch.order.split(many), epoch.places.split(many), strict=True):
        images, labels = cutter.cut(order, places, dtype), cutter.labels[order]
        yield from zip(images.split(epoch.batch), labels.split(epoch.batch), strict=True)


class _Steps(Dataset[Batch]):
    """An epoch's batches by their numbers, for torch's loader."""

    def __init__(self, cutter: Cutter, epoch: Epoch) -> None:
        self._cutter, self._epoch = cutter, epoch

    def __len__(self) -> int:
        return len(self._epoch)

    def __getitem__(self, number: int) -> Batch:
        part = slice(number * self._epoch.batch, (number + 1) * self._epoch.batch)
        order, places = self._epoch.order[part], self._epoch.places[part]
        images = self._cutter.cut(order, places, torch.float32)
        return images.contiguous(), self._cutter.labels[order]


def from_host(
    cutter: Cutter, epoch: Epoch, device: torch.device, *, pinned: bool, workers: int
) -> Iterator[Batch]:
    """The batches of an epoch as torch's loader brings them: made on the CPU, copied one by one."""
    pinned = pinned and device.type == "cuda"
    loader = DataLoader(
        _Steps(cutter, epoch), batch_size=None, num_workers=workers, pin_memory=pinned
    )
    for images, labels in loader:
        yield (
            images.to(device, non_blocking=pinned),
            labels.to(device, non_blocking=pinned),
        )
