"""Whether networks end up as good: several ways train from the same seeds, one run each.

Roundings move single runs of one and the same way apart, so that one pair shows nothing: what
counts is the mean difference of several pairs beside its standard error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite, nan
from statistics import fmean, stdev
from typing import Any

import torch
from shown import last_loss
from training import Feed, Study, train
from variants import Variant

from plantune.report.tables import table

MOST_ERRORS = 3.0
# A point.
MOST_ACCURACY = 0.01
# Of what the loss falls by.
MOST_OF_FALL = 0.02


def paired(
    study: Study, variants: Sequence[Variant], feed: Feed, pairs: int
) -> Iterator[dict[str, Any]]:
    """All variants beside the first of them, at `pairs` seeds from the study's own on: what is
    known after each seed.
    """
    runs: dict[str, list[dict[str, float]]] = {variant.name: [] for variant in variants}
    for seed in range(study.seed, study.seed + pairs):
        own = replace(study, seed=seed)
        for variant in variants:
            torch.compiler.reset()  # Dynamo compiles the same lines but a few times
            trained = train(own, variant, feed.for_study(own))
            losses = trained.losses
            run = {"accuracy": trained.accuracy, "last_loss": last_loss(losses)}
            runs[variant.name].append({**run, "first_loss": losses[0]})
            print(f"seed {seed}: {variant.name} {run}", flush=True)
        yield compared(runs, study.seed)


def compared(runs: Mapping[str, Sequence[Mapping[str, float]]], first_seed: int) -> dict[str, Any]:
    """Of the runs of each way, in the same order of seeds; the first way is the reference."""
    reference, *others = runs
    theirs = runs[reference]
    falls = [run["first_loss"] - run["last_loss"] for run in theirs]
    bounds = {"accuracy": MOST_ACCURACY, "last_loss": MOST_OF_FALL * fmean(falls)}
    return {
        "reference": reference,
        "seeds": [*range(first_seed, first_seed + len(theirs))],
        "runs": {name: [dict(run) for run in found] for name, found in runs.items()},
        "bounds": bounds,
        "differences": {
            name: {
                what: _difference([run[what] for run in runs[name]], theirs, what, bound)
                for what, bound in bounds.items()
            }
            for name in others
        },
    }


def _difference(
    own: Sequence[float], theirs: Sequence[Mapping[str, float]], what: str, bound: float
) -> dict[str, Any]:
    """`kept`: the mean difference is within the bound, and so it is by three standard errors."""
    apart = [one - other[what] for one, other in zip(own, theirs, strict=True)]
    mean = fmean(apart)
    error = stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else nan
    kept = isfinite(error) and abs(mean) + MOST_ERRORS * error <= bound
    return {"mean": mean, "standard_error": error if isfinite(error) else None, "kept": kept}


def shown_pairs(found: Mapping[str, Any]) -> str:
    """The mean of each way, and how far it is from the reference."""
    lines = []
    for name, runs in found["runs"].items():
        accuracy, loss = (fmean(run[what] for run in runs) for what in ("accuracy", "last_loss"))
        apart = found["differences"].get(name)
        texts = [_text(apart["accuracy"], 100), _text(apart["last_loss"], 1)] if apart else ["", ""]
        lines.append((name, f"{100 * accuracy:.2f} %", texts[0], f"{loss:.4f}", texts[1]))
    headers = (f"{len(found['seeds'])} runs", "accuracy", "points apart", "loss", "apart")
    return table(headers, lines, "lrrrr")


def _text(difference: Mapping[str, Any], factor: float) -> str:
    error = difference["standard_error"]
    if error is None:
        return f"{factor * difference['mean']:+.3f}, one pair shows nothing"
    said = "kept" if difference["kept"] else "not shown"
    return f"{factor * difference['mean']:+.3f} (error {factor * error:.3f}): {said}"
