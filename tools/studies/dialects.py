"""How long a module takes in each dialect that people speak, beside torch's best routes.

python tools/studies/dialects.py --json dialects.json
python tools/studies/dialects.py --works infer --dialects autocast --rivals compile-default

A dialect is what the owner of a module chose: float32 with or without tf32, autocast, or a module
in 16 bits. Nothing is searched for: plantune runs from its guess, unless a plan is stored or
shipped for that call. All routes of a row take turns on the same weights and images. Studies with
the same file for `--turns` build beside each other and time one by one, after all have built.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

import plantune
from plantune.devices.cuda.flags import float32_precisions, set_precisions
from plantune.devices.machine import environment_of
from plantune.models.registry import network

BATCHES = {"infer": 128, "train": 2048, "step": 2048}
RIVALS = ("eager", "cuda-graph", "compile-default", "compile-reduce-overhead")
LAYOUTS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
COMPARED = ("plantune", "eager")
FIRST_CALLS, ROUNDS, ROUND_S = 4, 21, 0.02
Runnable = Callable[[], Any]


@dataclass(frozen=True)
class Dialect:
    """The dtype of parameters and inputs, and the settings of torch's that calls run under."""

    dtype: torch.dtype = torch.float32
    tf32: bool = False
    autocast: torch.dtype | None = None

    @contextmanager
    def spoken(self, device: str) -> Iterator[None]:
        before, on = float32_precisions(), self.autocast is not None
        set_precisions(("tf32" if self.tf32 else "ieee",) * len(before))
        try:
            with torch.autocast(device, self.autocast or torch.float16, enabled=on):
                yield
        finally:
            set_precisions(before)


DIALECTS = {
    "float32": Dialect(),
    "tf32": Dialect(tf32=True),
    "autocast": Dialect(autocast=torch.float16),
    "autocast-bfloat16": Dialect(autocast=torch.bfloat16),
    "float16": Dialect(torch.float16),
    "bfloat16": Dialect(torch.bfloat16),
}


class Row:
    """One network in one dialect and one kind of work: makes the calls of its routes."""

    def __init__(self, name: str, dialect: Dialect, work: str, batch: int, device: str) -> None:
        torch.manual_seed(0)
        self.dialect, self.work, self.device = dialect, work, device
        spec = network(name)
        module = spec.build().train(work != "infer")
        with torch.no_grad():
            for parameter in module.parameters():  # zeros would hide faults
                if parameter.numel() == 1 or not parameter.any():
                    parameter.copy_(torch.randn_like(parameter) * 0.2 + 0.1)
        self.module = module.to(device, dialect.dtype)
        shape = spec.input_shape(batch)
        self.x = torch.randn(shape, device=device, dtype=dialect.dtype)
        with dialect.spoken(device), torch.no_grad():
            made = deepcopy(self.module)(self.x)
        self.dy = torch.randn_like(made) / made.numel() ** 0.5

    def given(self, layout: str) -> tuple[nn.Module, Tensor]:
        order = LAYOUTS[layout]
        module = deepcopy(self.module).to(memory_format=order)
        return module, self.x.clone(memory_format=order)

    def plantune(self, layout: str) -> Runnable:
        module, x = self.given(layout)
        mode = "infer" if self.work == "infer" else "train"
        with self.dialect.spoken(self.device):
            tuned = plantune.optimize(module, x, mode=mode)
        if self.work != "step":
            return self._call(tuned, tuned, x)
        step = plantune.TrainStep(tuned, self._loss, _adamw(tuned, capturable=False))
        return self._spoken(lambda: step(x, self.dy))

    def rival(self, route: str, layout: str) -> Runnable:
        module, x = self.given(layout)
        run: Any = module
        if route.startswith("compile-"):
            run = torch.compile(module, mode=route.removeprefix("compile-"), dynamic=False)
        call = self._call(run, module, x)
        return _captured(call) if route == "cuda-graph" else call

    def _call(self, run: Any, module: nn.Module, x: Tensor) -> Runnable:
        if self.work == "infer":

            def infer() -> Any:
                with torch.no_grad():
                    return run(x)

            return self._spoken(infer)
        if self.work == "train":

            def passes() -> list[Tensor | None]:
                module.zero_grad()
                made = run(x)
                torch.autograd.backward(made, self.dy)
                return [made.detach(), *(p.grad for p in module.parameters())]

            return self._spoken(passes)
        optimizer = _adamw(module, capturable=self.device == "cuda")

        def step() -> None:
            optimizer.zero_grad()
            self._loss(run(x), self.dy).backward()
            optimizer.step()

        return self._spoken(step)

    def _spoken(self, call: Runnable) -> Runnable:
        def spoken() -> Any:
            with self.dialect.spoken(self.device):
                return call()

        return spoken

    @staticmethod
    def _loss(made: Tensor, dy: Tensor) -> Tensor:
        return (made.float() * dy.float()).sum()

    def exact(self) -> list[Tensor]:
        """The results and gradients in float64."""
        module, x = deepcopy(self.module).double(), self.x.double()
        with torch.set_grad_enabled(self.work != "infer"):
            made = module(x)
        if self.work != "infer":
            torch.autograd.backward(made, self.dy.double())
        return [made.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


def _adamw(module: nn.Module, *, capturable: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), 1e-7, fused=True, capturable=capturable)


def _captured(call: Runnable) -> Runnable:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(FIRST_CALLS):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call()

    def replay() -> Any:
        graph.replay()
        return made

    return replay


def errors(made: Any, exact: Sequence[Tensor]) -> list[float]:
    """Of each result and gradient, relative to its norm."""
    tensors = [made] if isinstance(made, Tensor) else [t for t in made if t is not None]
    return [
        float((t.double() - e).norm() / e.norm().clamp(min=1e-30))
        for t, e in zip(tensors, exact, strict=True)
    ]


def compared(calls: dict[str, Runnable], exact: Sequence[Tensor]) -> dict[str, Any]:
    """Errors of ours and of eager, and the largest one of ours by eager's of the same tensor."""
    of = {t: errors(call(), exact) for t, call in calls.items() if t.startswith(COMPARED)}
    theirs = [max(each) for each in zip(*(e for t, e in of.items() if "eager" in t), strict=True)]
    ours = [max(each) for each in zip(*(e for t, e in of.items() if "plan" in t), strict=True)]
    pairs = zip(ours, theirs, strict=False)
    ratio = {"error_ratio": max(a / max(b, 1e-12) for a, b in pairs)} if theirs else {}
    return {"errors": of, **ratio}


def timed(calls: dict[str, Runnable]) -> dict[str, list[float]]:
    """Microseconds of a call of each route, one figure a round; the routes take turns."""
    counts = {}
    for name, call in calls.items():
        for _ in range(FIRST_CALLS):
            call()
        counts[name] = max(1, int(ROUND_S / max(_round_us(call, 10) * 1e-6, 1e-6)))
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            found[name].append(_round_us(call, counts[name]))
    return found


def _round_us(call: Runnable, count: int) -> float:
    if not torch.cuda.is_available():
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count * 1e3


def measured(
    name: str,
    dialect: str,
    work: str,
    batch: int,
    rivals: Sequence[tuple[str, str]],
    turns: IO[str] | None,
) -> dict[str, Any]:
    """One row of the table; a rival that fails says why."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    row, calls, failures = Row(name, DIALECTS[dialect], work, batch, device), {}, {}
    # Captured ones last: while torch.compile records its graphs, it gives back the workspaces of
    # cuBLAS, and graphs from before would write to what is there then.
    rivals = sorted(rivals, key=lambda rival: rival[0] == "cuda-graph")
    for route, layout in (*(("plantune", layout) for layout in LAYOUTS), *rivals):
        title = f"{route} {layout}"
        try:
            call = row.plantune(layout) if route == "plantune" else row.rival(route, layout)
            for _ in range(FIRST_CALLS):
                call()
            calls[title] = call
        except (RuntimeError, ValueError, TypeError) as error:
            if route == "plantune":
                raise
            failures[title] = str(error).splitlines()[0][:200]
    found: dict[str, Any] = {"network": name, "dialect": dialect, "work": work, "batch": batch}
    if work != "step":
        exact = row.exact()
        found |= compared(calls, exact)
    print(f"{work} {dialect}: built", file=sys.stderr, flush=True)
    if turns is not None:
        fcntl.flock(turns, fcntl.LOCK_EX)  # once nobody builds
    times = timed(calls)
    if turns is not None:
        fcntl.flock(turns, fcntl.LOCK_SH)
    return {**found, **judged(times), "failures": failures}


def judged(times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, spreads, and the ratio to the best rival, round by round, in the better layout."""
    medians = {title: statistics.median(found) for title, found in times.items()}
    best = min((t for t in medians if not t.startswith("plantune")), key=medians.__getitem__)
    found: dict[str, Any] = {"best_rival": best, "us": {}}
    for title, each in times.items():
        low, *_, high = statistics.quantiles(each, n=10)
        found["us"][title] = {"median": medians[title], "low": low, "high": high}
    for layout in LAYOUTS:
        ours = times[f"plantune {layout}"]
        ratios = sorted(a / b for a, b in zip(ours, times[best], strict=True))
        found[f"ratio {layout}"] = statistics.median(ratios)
    return found


def shown(row: dict[str, Any]) -> str:
    us = "  ".join(f"{title} {found['median']:.0f}" for title, found in row["us"].items())
    worst = f"  error by eager's {row['error_ratio']:.2f}" if "error_ratio" in row else ""
    ratios = "/".join(f"{row[f'ratio {layout}']:.3f}" for layout in LAYOUTS)
    return f"{row['work']:6}{row['dialect']:18}{ratios} of {row['best_rival']}{worst}\n    {us}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="se_resnet9_fixup")
    parser.add_argument("--works", nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--dialects", nargs="+", choices=DIALECTS, default=list(DIALECTS))
    parser.add_argument("--rivals", nargs="+", choices=RIVALS, default=list(RIVALS))
    parser.add_argument("--rival-layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--batch", type=int, help="instead of 128 images, and 2,048 in training")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--turns", type=argparse.FileType("a"), metavar="FILE")
    given = parser.parse_args()
    if given.turns is not None:
        fcntl.flock(given.turns, fcntl.LOCK_SH)
    torch.backends.cudnn.benchmark = True
    rivals = [(route, layout) for route in given.rivals for layout in given.rival_layouts]
    rows = []
    for work in given.works:
        for dialect in given.dialects:
            batch = given.batch or BATCHES[work]
            rows.append(measured(given.network, dialect, work, batch, rivals, given.turns))
            print(shown(rows[-1]), flush=True)
            if given.json:
                environment = environment_of(
                    torch.device("cuda" if torch.cuda.is_available() else "cpu")
                ).to_json()
                found = {"environment": environment, "rows": rows}
                given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
