"""tools/studies/cifar: the images of a batch, against torch's own operators one by one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


@pytest.fixture
def images(part):
    data = part("images")
    random = torch.Generator().manual_seed(1)
    pixels = torch.randint(256, (10, 3, 32, 32), dtype=torch.uint8, generator=random)
    return data.Images(pixels, torch.arange(10))


def normalised(pixels: Tensor) -> Tensor:
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (MEAN, STD))
    return (pixels.float() / 255 - mean) / std


@pytest.mark.parametrize(("margin", "mirrored"), [(4, False), (2, True), (0, False)])
def test_every_place_is_a_crop_turned_or_not(part, images, margin: int, mirrored: bool) -> None:
    augment = part("batches").Augment(MEAN, STD, margin, mirrored)
    cutter = part("batches").Cutter(images, augment, torch.device("cpu"))
    mode = "reflect" if mirrored else "constant"
    wide = F.pad(images.pixels.float(), (margin,) * 4, mode)
    assert augment.places == 2 * (2 * margin + 1) ** 2
    seen = set()
    for place in range(augment.places):
        at, number = place // 2, place % 10
        top, left = at // (2 * margin + 1), at % (2 * margin + 1)
        crop = wide[number, :, top : top + 32, left : left + 32]
        wanted = normalised(crop.flip(-1) if place % 2 else crop)
        made = cutter.cut(torch.tensor([number]), torch.tensor([place]), torch.float32)
        torch.testing.assert_close(made[0], wanted)
        seen.add((top, left, place % 2))
    assert len(seen) == augment.places
    whole = cutter.whole(slice(3, 5), torch.float32)
    torch.testing.assert_close(whole, normalised(images.pixels[3:5]))


def test_an_epoch_of_cifar_has_391_steps_and_the_last_80_images(part) -> None:
    augment = part("batches").Augment(MEAN, STD)
    epoch = part("batches").Epoch.drawn(0, 0, 50_000, augment, 128)
    parts = epoch.order.split(128)
    assert len(epoch) == len(parts) == 391
    assert len(parts[-1]) == 80
    assert torch.equal(epoch.order.sort().values, torch.arange(50_000))


def test_places_are_drawn_evenly_and_follow_from_the_seed(part) -> None:
    augment = part("batches").Augment(MEAN, STD)
    drawn = part("batches").Epoch.drawn
    first, again, next_one, other = (
        drawn(seed, number, 50_000, augment, 128)
        for seed, number in ((0, 0), (0, 0), (0, 1), (1, 0))
    )
    assert torch.equal(first.places, again.places)
    for different in (next_one, other):
        assert not torch.equal(first.places, different.places)
        assert not torch.equal(first.order, different.order)
    counts = first.places.bincount(minlength=augment.places).double()
    expected = 50_000 / augment.places
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    freedom = augment.places - 1
    assert abs(chi_squared - freedom) < 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("at_once", [1, 8, 8192])
def test_the_device_and_the_loader_bring_the_same_batches(
    part, images, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    batches, cpu = part("batches"), torch.device("cpu")
    monkeypatch.setattr(batches, "IMAGES_AT_ONCE", at_once)
    augment = batches.Augment(MEAN, STD)
    cutter = batches.Cutter(images, augment, cpu)
    epoch = batches.Epoch.drawn(3, 0, 10, augment, 4)
    here = [*batches.on_device(cutter, epoch, torch.float32)]
    there = [*batches.from_host(cutter, epoch, cpu, pinned=True, workers=0)]
    assert [len(labels) for _, labels in here] == [4, 4, 2]
    for (x, y), (other, of_other) in zip(here, there, strict=True):
        assert torch.equal(x, other)
        assert torch.equal(y, of_other)
        assert x.is_contiguous(memory_format=torch.channels_last)
        assert other.is_contiguous()
    assert torch.equal(torch.cat([y for _, y in here]), epoch.order)
