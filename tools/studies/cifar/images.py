"""CIFAR's images and labels: from a folder in either of its formats, or made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pickles import Array, read_pickle
from torch import Tensor
from torch.nn.functional import interpolate

SIDE = 32
PIXELS = 3 * SIDE * SIDE
TRAINED, TESTED = 50_000, 10_000
# Made at once: noise in float32 takes four times as much memory as the images.
CHUNK = 5_000
# How much a made image shows of its class beside noise, in shades of 256: from least to most.
CONTRAST, NOISE = (25.0, 60.0), 40.0


@dataclass(frozen=True)
class Images:
    pixels: Tensor  # (N, 3, 32, 32), bytes
    labels: Tensor  # (N,), int64

    def first(self, count: int) -> Images:
        return Images(self.pixels[:count], self.labels[:count])


@dataclass(frozen=True)
class DataSet:
    name: str
    classes: int
    train: Images
    test: Images


@dataclass(frozen=True)
class Format:
    """Files of a folder; `label_bytes` stand before each image of a binary one, the last counts."""

    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    classes: int
    label_bytes: int = 0
    labels: str = ""


FORMATS = (
    Format("cifar-100-python", ("train",), ("test",), 100, labels="fine_labels"),
    Format("cifar-100-binary", ("train.bin",), ("test.bin",), 100, label_bytes=2),
    Format(
        "cifar-10-batches-py",
        tuple(f"data_batch_{i}" for i in range(1, 6)),
        ("test_batch",),
        10,
        labels="labels",
    ),
    Format(
        "cifar-10-batches-bin",
        tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
        ("test_batch.bin",),
        10,
        label_bytes=1,
    ),
)


def read_folder(place: Path, *classes: int) -> DataSet:
    """CIFAR with one of these numbers of classes, in that folder or in its own one below. Raises
    ValueError.
    """
    forms = [form for count in classes for form in FORMATS if form.classes == count]
    for form in forms:
        for folder in (place, place / form.folder):
            names = (*form.train, *form.test)
            if all((folder / name).is_file() for name in names):
                parts = (form.train, form.test)
                train, test = ([_file(folder / name, form) for name in part] for part in parts)
                return DataSet(f"CIFAR-{form.classes}", form.classes, _joined(train), _joined(test))
    counts, wanted = " or ".join(map(str, classes)), " or ".join(form.folder for form in forms)
    raise ValueError(f"{place} is not CIFAR with {counts} classes: it has no files of {wanted}")


def _file(path: Path, form: Format) -> Images:
    found = _binary(path, form.label_bytes) if form.label_bytes else _pickled(path, form.labels)
    if not len(found.labels) or int(found.labels.max()) >= form.classes:
        raise ValueError(f"{path} has labels that are not below {form.classes}, or none")
    return found


def _pickled(path: Path, labels: str) -> Images:
    held = read_pickle(path)
    data, numbers = held.get("data"), held.get(labels)
    if not isinstance(data, Array) or not isinstance(numbers, list):
        raise ValueError(f"{path} has no 'data' and {labels!r}")
    if data.shape != (len(numbers), PIXELS) or len(data.data) != len(numbers) * PIXELS:
        raise ValueError(f"{path} has {len(numbers)} labels, and images of {data.shape}")
    return Images(_bytes(data.data).view(-1, 3, SIDE, SIDE), torch.tensor(numbers))


def _binary(path: Path, label_bytes: int) -> Images:
    data, record = path.read_bytes(), label_bytes + PIXELS
    if len(data) % record:
        raise ValueError(f"{path} has {len(data)} bytes, which is not a multiple of {record}")
    rows = _bytes(data).view(-1, record)
    pixels = rows[:, label_bytes:].reshape(-1, 3, SIDE, SIDE)
    return Images(pixels, rows[:, label_bytes - 1].long())


def _bytes(data: Any) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _joined(parts: list[Images]) -> Images:
    return Images(torch.cat([p.pixels for p in parts]), torch.cat([p.labels for p in parts]))


def made(
    classes: int,
    trained: int = TRAINED,
    tested: int = TESTED,
    contrast: tuple[float, float] = CONTRAST,
) -> DataSet:
    """Each class has a pattern of few waves, which an image shows more or less clearly beside
    noise: a network learns them within some epochs. If the least contrast is 0, some images show
    nothing, and how many are named right says how good a network is. The same numbers on every
    machine.
    """
    random, (least, most) = torch.Generator().manual_seed(7), contrast
    patterns = torch.randn(classes, 3, 4, 4, generator=random)
    patterns = interpolate(patterns, (SIDE, SIDE), mode="bicubic")
    patterns = patterns / patterns.flatten(1).std(1).view(-1, 1, 1, 1)

    def images(count: int) -> Images:
        labels = torch.randint(classes, (count,), generator=random)
        parts = [*_drawn(labels, patterns, (least, most - least), random)]
        return Images(torch.cat(parts), labels)

    return DataSet("made", classes, images(trained), images(tested))


def _drawn(
    labels: Tensor, patterns: Tensor, contrasts: tuple[float, float], random: torch.Generator
) -> Iterator[Tensor]:
    least, more = contrasts
    for part in labels.split(CHUNK):
        contrast = torch.rand(len(part), 1, 1, 1, generator=random) * more
        noise = torch.randn(len(part), 3, SIDE, SIDE, generator=random) * NOISE
        shades = patterns[part] * (contrast + least) + noise + 128
        yield shades.clamp_(0, 255).byte()
