"""Trains one variant: its losses, its accuracy in the end, and what its phases take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from batches import Batch, Cutter, Epoch, from_host, on_device
from images import DataSet
from phases import Phases
from torch import Tensor, nn
from variants import DEVICE, PINNED, Variant
from ways import Precision, Setting
from workloads import Workload, load_weights

from plantune.base.scopes import with_values
from plantune.devices.cuda.flags import cudnn

TESTED_AT_ONCE = 500
WHITENED = 5_000


@dataclass(frozen=True)
class Study:
    """What all variants have in common."""

    workload: Workload
    data: DataSet
    device: torch.device
    precision: Precision
    narrow: torch.dtype | None = None
    batch: int = 128
    epochs: int = 1
    most_steps: int | None = None
    seed: int = 0
    workers: int = 0
    weights: Path | None = None

    @property
    def steps(self) -> int:
        whole = -(-len(self.data.train.labels) // self.batch) * self.epochs
        return min(whole, self.most_steps or whole)

    @property
    def images(self) -> torch.dtype:
        """The dtype in which the network takes them where they are made on its device."""
        return self.narrow or torch.float32


@dataclass
class Trained:
    """What became of one variant."""

    variant: Variant
    model: nn.Module
    step: Any
    losses: list[float] = field(default_factory=list)
    accuracy: float = 0.0
    ms: dict[str, float] = field(default_factory=dict)
    ragged_ms: dict[str, float] = field(default_factory=dict)
    first_step_s: float = 0.0
    seconds: float = 0.0
    peak_mib: float | None = None


class Feed:
    """The data set where a variant takes it from."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self._cutters: dict[str, Cutter] = {}

    def for_study(self, study: Study) -> Feed:
        """That of the same images for another seed."""
        other = Feed(study)
        other._cutters = self._cutters
        return other

    def cutter(self, device: torch.device) -> Cutter:
        """Of the images to train on; kept for the next variant."""
        if device.type not in self._cutters:
            augment = self._study.workload.augment
            self._cutters[device.type] = Cutter(self._study.data.train, augment, device)
        return self._cutters[device.type]

    def batches(self, variant: Variant) -> Iterator[Batch]:
        """All batches of a run."""
        study, augment = self._study, self._study.workload.augment
        count = len(study.data.train.labels)
        place = study.device if variant.data == DEVICE else torch.device("cpu")
        # At first: to draw an epoch, and to bring it to a GPU, would make steps wait.
        epochs = [
            Epoch.drawn(study.seed, number, count, augment, study.batch).to(place)
            for number in range(study.epochs)
        ]
        return islice(chain.from_iterable(self._of(variant, e) for e in epochs), study.steps)

    def _of(self, variant: Variant, epoch: Epoch) -> Iterator[Batch]:
        study = self._study
        if variant.data == DEVICE:
            return on_device(self.cutter(study.device), epoch, study.images)
        pinned = variant.data == PINNED
        host = self.cutter(torch.device("cpu"))
        found = from_host(host, epoch, study.device, pinned=pinned, workers=study.workers)
        if study.narrow is None:
            return found
        return ((images.to(study.narrow), labels) for images, labels in found)


def built(study: Study, variant: Variant, feed: Feed) -> nn.Module:
    """The same weights for each variant."""
    torch.manual_seed(study.seed)
    model = study.workload.build()
    if study.weights is not None:
        load_weights(model, study.weights)
    if study.workload.prepare is not None:
        images = feed.cutter(torch.device("cpu")).whole(slice(0, WHITENED), torch.float32)
        study.workload.prepare(model, images)
    model = model.to(study.device)
    if study.narrow is not None and study.workload.narrow is not None:
        model = study.workload.narrow(model, study.narrow)
    return model.to(memory_format=torch.channels_last) if variant.channels_last else model


def train(study: Study, variant: Variant, feed: Feed) -> Trained:
    """A whole run; the sums of losses are read once it is over."""
    setting = Setting(
        *(study.workload, built(study, variant, feed), study.device),
        *(study.precision, variant.fused, study.steps),
    )
    if study.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with with_values(cudnn, benchmark=variant.benchmark):
        made = _run(study, variant, feed, setting)
    if study.device.type == "cuda":
        made.peak_mib = torch.cuda.max_memory_allocated() / 2**20
    made.accuracy = accuracy(study, setting.model)
    return made


def _run(study: Study, variant: Variant, feed: Feed, setting: Setting) -> Trained:
    phases, losses = Phases(study.device), []
    batches, began = feed.batches(variant), time.monotonic()
    made: Trained | None = None
    phases.begin()
    while (batch := next(batches, None)) is not None:
        phases.mark("data")
        if made is None:
            made = Trained(variant, setting.model, variant.make(setting, batch[0]))
        losses.append(made.step(*batch, phases.mark))
        phases.end(len(batch[0]))
        if len(losses) == 1:
            losses[0].item()
            made.first_step_s = time.monotonic() - began
        phases.begin()
    assert made is not None
    made.losses = torch.stack(losses).float().cpu().tolist()
    made.seconds = time.monotonic() - began
    made.ms = phases.means(study.batch)
    rest = len(study.data.train.labels) % study.batch
    made.ragged_ms = phases.means(rest) if rest else {}
    return made


@torch.no_grad()
def accuracy(study: Study, model: nn.Module) -> float:
    """The part of the test set that the network names right, eagerly."""
    test = Cutter(study.data.test, study.workload.augment, study.device)
    model.eval()
    right = torch.zeros((), device=study.device)
    with study.precision.casting(study.device):
        for at in range(0, len(test.labels), TESTED_AT_ONCE):
            part = slice(at, at + TESTED_AT_ONCE)
            outputs: Tensor = model(test.whole(part, study.images))
            right += (outputs.argmax(1) == test.labels[part]).sum()
    model.train()
    return float(right) / max(len(test.labels), 1)
