"""What a step of training on small images takes, and where its time goes, in several ways.

    python tools/studies/cifar                                # ResNet-50, 100 classes, one epoch
    python tools/studies/cifar --data cifar-100-python        # CIFAR-100 instead of made images
    python tools/studies/cifar --network airbench94  # another network and step, 2,000 images
    python tools/studies/cifar --small                        # on 2 cores of a CPU in two minutes
    python tools/studies/cifar --pairs 8  # how good networks become, seed by seed

Every row begins with the same weights and meets the same images, and ends with its loss and its
accuracy. The rows up to `all-three` take the step as one writes it at first, with images from
torch's loader; the others, torch's best and plantune's, make their images on the GPU. Then the
steps of the latter run in turns. Prints tables; writes cifar_study.json and cifar_study.png (if
matplotlib is there) under --out. Exit code 1 if a row failed.

With --pairs rows are runs at several seeds instead, and nothing is timed: the mean difference of
the first row's accuracy and another one's, beside its standard error. It is kept if three of these
are within one point.
"""

from __future__ import annotations

import argparse
import json
import warnings
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from images import CONTRAST, DataSet, made, read_folder
from pairs import paired, shown_pairs
from race import raced
from shown import plotted, row_of, shown, shown_race
from traces import profiled, python_profiled
from training import Feed, Study, Trained, built, train
from variants import DEVICE, VARIANTS, Variant, chosen
from ways import Precision
from workloads import SMALL, WORKLOADS, Workload, save_weights

from plantune import UnplannedCall, tune
from plantune.devices.device import first_line
from plantune.devices.machine import environment_of

SMALL_IMAGES, SMALL_TESTED = 136, 200


def main(argv: list[str] | None = None) -> int:
    given = arguments(argv)
    warnings.simplefilter("ignore", UnplannedCall)  # rows tell what ran
    study = study_of(given)
    on_gpu = study.device.type == "cuda"
    variants = chosen(_names(given, on_gpu=on_gpu), study.workload.name, on_gpu=on_gpu)
    feed, done, failures = Feed(study), list[Trained](), dict[str, str]()
    if given.search:
        search(study, feed, given.search)
    if given.pairs:
        return _pairs(given, study, variants, feed)
    for variant in variants:
        found = _row(study, variant, feed, failures)
        if found is not None:
            done.append(found)
    rows = [row_of(each, _baseline(done)) for each in done]
    print(f"\n{shown(rows)}\n")
    for name, said in failures.items():
        print(f"{name} failed: {said}")
    if not given.dry_run:
        _finish(
            given,
            study,
            feed,
            done,
            {**_document(given, study), "rows": rows} | {"failures": failures},
        )
    return 1 if failures else 0


def _names(given: argparse.Namespace, *, on_gpu: bool) -> list[str] | None:
    if given.pairs and not given.variants:
        return ["cuda-graph" if on_gpu else "baseline", "plantune-step"]
    names: list[str] | None = given.variants
    return names


def _pairs(given: argparse.Namespace, study: Study, variants: list[Variant], feed: Feed) -> int:
    document = _document(given, study)
    for found in paired(study, variants, feed, given.pairs):
        _write(given, {**document, "pairs": found})
    print(f"\n{shown_pairs(found)}")
    kept = [apart["accuracy"]["kept"] for apart in found["differences"].values()]
    return 0 if all(kept) else 1


def _row(study: Study, variant: Variant, feed: Feed, failures: dict[str, str]) -> Trained | None:
    try:
        found = train(study, variant, feed)
    except Exception as error:  # whatever a compiler says: the other rows are worth having
        failures[variant.name] = f"{type(error).__name__}: {first_line(error)}"
        return None
    print(json.dumps({**row_of(found, None), "losses": len(found.losses)}), flush=True)
    return found


def _baseline(done: list[Trained]) -> Trained | None:
    return next((each for each in done if each.variant.name == "baseline"), None)


def _finish(
    given: argparse.Namespace,
    study: Study,
    feed: Feed,
    done: list[Trained],
    document: dict[str, Any],
) -> None:
    """The race, the profiles, and all that is written."""
    given.out.mkdir(parents=True, exist_ok=True)
    batch = next(feed.batches(VARIANTS["plantune"]))
    racers = [each for each in done if each.variant.data == DEVICE]
    if given.race_seconds and len(racers) > 1:
        document["race"] = raced(racers, batch, given.race_seconds)
        print(f"{shown_race(document['race'])}\n")
    for each in done:
        if each.variant.name in given.profile:
            print(profiled(each, batch, given.out), "\n")
        if each.variant.name in given.cprofile:
            print(python_profiled(each, batch, given.out))
        if each.variant.name == given.save_of and given.save is not None:
            save_weights(each.model, given.save)
    _write(given, document)
    try:
        plotted(document, given.out / "cifar_study.png")
    except ImportError:
        print("no plot: matplotlib is not installed")


def _write(given: argparse.Namespace, document: dict[str, Any]) -> None:
    given.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(document, indent=1)
    (given.out / "cifar_study.json").write_text(text + "\n", encoding="utf-8")


def study_of(given: argparse.Namespace) -> Study:
    """What is to be trained, on what."""
    on_gpu = torch.cuda.is_available() and not given.small
    workload = (SMALL if given.small else WORKLOADS)[given.network]
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    batch = given.batch or workload.batch
    narrow = torch.float16 if on_gpu else torch.bfloat16
    data = _data(given, workload, batch)
    study = Study(
        *(workload.for_classes(data.classes), data, device, Precision()),
        batch=batch,
        epochs=given.epochs or workload.epochs,
        most_steps=2 if given.dry_run else given.steps,
        seed=given.seed,
        workers=given.workers if on_gpu else 0,
        weights=given.weights,
    )
    if workload.narrow is not None:  # it names its precision itself
        return replace(study, narrow=narrow) if on_gpu else study
    if given.precision == "float32" or (given.precision is None and not on_gpu):
        return study
    return replace(study, precision=Precision(narrow, scaled=on_gpu))


def search(study: Study, feed: Feed, seconds: float) -> None:
    """Finds and stores the plan that plantune's rows then run from."""
    variant = VARIANTS["plantune"]
    model, (images, _) = built(study, variant, feed), next(feed.batches(variant))
    print(tune(model, images, budget=seconds, mode="train").summary(), flush=True)


def _data(given: argparse.Namespace, workload: Workload, batch: int) -> DataSet:
    if given.data is not None:
        try:
            data = read_folder(given.data, workload.classes, *workload.other_classes)
        except ValueError as error:
            raise SystemExit(f"cifar_study: {error}") from None
        return replace(data, train=data.train.first(given.images or len(data.train.labels)))
    sizes: tuple[int, ...] = ()
    if given.dry_run:  # a whole batch and a smaller one
        sizes = batch + batch * 5 // 8, batch
    elif given.small:
        sizes = given.images or SMALL_IMAGES, SMALL_TESTED
    elif given.images:
        sizes = given.images, max(given.images // 5, 1)
    return made(workload.classes, *sizes, contrast=tuple(given.contrast))


def _document(given: argparse.Namespace, study: Study) -> dict[str, Any]:
    dtype = study.narrow or study.precision.autocast or torch.float32
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "environment": environment_of(study.device).to_json(),
        "network": study.workload.name,
        "data": study.data.name,
        "images": len(study.data.train.labels),
        "contrast": None if given.data else [*given.contrast],
        "batch": study.batch,
        "epochs": study.epochs,
        "steps": study.steps,
        "seed": study.seed,
        "precision": str(dtype).removeprefix("torch."),
        "autocast": study.precision.autocast is not None,
        "loss_scale": study.precision.scaled,
        "searched_s": given.search,
    }


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    say = parser.add_argument
    say("--network", choices=WORKLOADS, default="resnet50")
    say("--data", type=Path, metavar="FOLDER", help="CIFAR as pickles or binary, else made images")
    say("--small", action="store_true", help="a small network on the CPU, in two minutes")
    say("--variants", nargs="+", choices=VARIANTS, metavar="NAME", help=", ".join(VARIANTS))
    say("--precision", choices=("amp", "float32"), help="on a GPU amp, unless it is given")
    say("--batch", type=int)
    say("--epochs", type=int)
    say("--steps", type=int, help="at most so many in all")
    say("--images", type=int, metavar="N", help="the first N of the training set")
    shades = {"nargs": 2, "type": float, "default": CONTRAST, "metavar": ("LEAST", "MOST")}
    say("--contrast", **shades, help="of made images: less is harder to learn")
    say("--seed", type=int, default=0)
    say("--workers", type=int, default=2, help="processes of torch's loader, on a GPU")
    say("--weights", type=Path, metavar="FILE", help="a checkpoint to begin with")
    say("--save", type=Path, metavar="FILE", help="the trained weights, for torchvision's network")
    say("--save-of", default="plantune-step", choices=VARIANTS, metavar="NAME", help="whose")
    say("--profile", nargs="+", default=(), choices=VARIANTS, metavar="NAME", help="with traces")
    say("--cprofile", nargs="+", default=(), choices=VARIANTS, metavar="NAME", help="Python's")
    say("--search", type=float, metavar="SECONDS", help="for a plan first, where none is autocast")
    say("--pairs", type=int, metavar="N", help="runs of each at N seeds, for their accuracy")
    say("--race-seconds", type=float, default=5.0, metavar="SECONDS", help="0 for no race")
    say("--dry-run", action="store_true", help="two steps of each row; nothing is written")
    say("--out", type=Path, default=Path())
    given = parser.parse_args(argv)
    autocast = given.precision == "amp" or (given.precision is None and not given.small)
    if given.search and autocast and WORKLOADS[given.network].narrow is None:
        parser.error("--search: a plan under autocast is not searched for; add --precision float32")
    return given
