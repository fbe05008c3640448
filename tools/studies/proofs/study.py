"""Tries every bound with the framework's own kernels as plans, on random blocks and norms.

    python tools/studies/proofs --seeds 0:200                      # this CPU, in a minute
    OMP_NUM_THREADS=1 python tools/studies/proofs --seeds 0:3000
    python tools/studies/proofs --seeds 0:500 --device cuda        # torch for CUDA

None may be refused: exit code 1 if one is. Each seed gives a block, its sizes, a dtype, a mode and
a layout (`cases.py`), and each bound (`bounds.py`) is tried with a plan of the framework's kernels
in one of both layouts; the proof of a whole network with both. `--plans ours` tries the plans that
one would pick by hand instead.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from blocks import KINDS
from bounds import BOUNDS, Tried
from cases import MODES, PLANS, Asked, Case, case_of


def main(arguments: Sequence[str] | None = None) -> int:
    given = _arguments(arguments)
    asked = Asked(given.device, tuple(given.kinds), tuple(given.modes), tuple(given.dtypes))
    counts: Counter[tuple[str, str]] = Counter()
    began = time.monotonic()
    first, end = map(int, given.seeds.split(":"))
    for seed in range(first, end):
        case = case_of(seed, asked)
        for plan, tried in tries(case, given.bounds, given.plans):
            counts[tried.bound, _outcome(tried)] += 1
            if not tried.passed and tried.judged:
                print(f"{seed} {plan} {case.text}: {tried.bound}: {tried.reason}", flush=True)
    _show(counts, end - first, time.monotonic() - began)
    return int(any(outcome in ("refused", "failed") for _, outcome in counts))


def tries(
    case: Case, bounds: Sequence[str] = tuple(BOUNDS), plans: Sequence[str] = PLANS
) -> Iterator[tuple[str, Tried]]:
    """Every bound with one plan, that of the whole network with all. A case that fails otherwise
    says so once.
    """
    with case.precision():
        for bound in bounds:
            fitting = [name for name in plans if name not in PLANS or name in case.layouts]
            names = fitting if bound == "network" else fitting[case.seed % len(fitting) :][:1]
            for name in names:
                try:
                    yield from ((name, tried) for tried in BOUNDS[bound](case, case.plan(name)))
                except Exception as error:  # a fault of another kind, which ends no study
                    where = traceback.format_exc(limit=-1).splitlines()[1].strip()
                    yield (
                        name,
                        Tried(bound, f"{type(error).__name__}: {error} ({where})", failed=True),
                    )


def _outcome(tried: Tried) -> str:
    if tried.failed:
        return "failed"
    if not tried.judged:
        return "not judged"
    return "passed" if tried.reason is None else "refused"


def _show(counts: Counter[tuple[str, str]], cases: int, seconds: float) -> None:
    outcomes = ("passed", "refused", "not judged", "failed")
    print(f"\n{cases} cases in {seconds:.0f} s, torch {torch.__version__}")
    print(f"{'bound':10}" + "".join(f"{name:>12}" for name in outcomes))
    for bound in dict.fromkeys(bound for bound, _ in counts):
        print(f"{bound:10}" + "".join(f"{counts[bound, name]:12}" for name in outcomes))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0:200", metavar="FIRST:END")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--bounds", nargs="+", default=[*BOUNDS], choices=BOUNDS)
    parser.add_argument("--plans", nargs="+", default=[*PLANS], choices=(*PLANS, "ours"))
    parser.add_argument("--kinds", nargs="+", default=[*KINDS], choices=KINDS)
    parser.add_argument("--modes", nargs="+", default=[*MODES], choices=[*dict.fromkeys(MODES)])
    parser.add_argument("--dtypes", nargs="+", default=[])
    return parser.parse_args(arguments)
