"""How long recurrent layers over sequences take, and an agent's policy with such a memory.

    python tools/studies/recurrent.py           # on a GPU: 32 steps of 64 samples, 512 hidden units
    python tools/studies/recurrent.py --only sizes    # layers of other sizes too
    python tools/studies/recurrent.py --small   # tiny, on the CPU

`layers`: forward and backward of a GRU and an LSTM, by cuDNN (torch's own layer) and by plantune
(EpisodicGRU and EpisodicLSTM, which also know where episodes end), in float16 and in float32 with
and without tf32. `sizes`: the same with other numbers of steps, samples and units, and forward
alone: plantune/space/recurrent.py says by it which of torch's layers are read as scans. `policy`:
plantune.models.policy acts for 128 agents and learns from 32 steps of 64, in float16; beside it
eager and torch.compile, whose memory is cuDNN's and knows no episodes.

On a GPU what can be captured is replayed as a CUDA graph; ways take turns. Writes
recurrent_study.json under --out, and bars into recurrent_study.png if matplotlib is there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from plantune import optimize
from plantune.base.scopes import with_values
from plantune.devices.cuda.flags import cudnn
from plantune.devices.machine import environment_of
from plantune.errors import PlantuneError
from plantune.layers import EpisodicGRU, EpisodicLSTM
from plantune.models.policy import Policy, PolicySizes
from plantune.report.tables import table
from plantune.runtime.watched.copies import copied

ROUNDS, CALLS = 11, 10
PARTS = ("layers", "acts", "learns", "sizes")
# Steps, samples and units: around those of `layers`, and the least that are read as scans.
SHAPES = (
    *((16, 16, 256), (1, 128, 512), (1, 512, 512), (8, 64, 512), (32, 8, 512), (32, 64, 128)),
    *((16, 16, 512), (4, 64, 512), (32, 1, 512), (32, 64, 256), (32, 256, 512), (100, 64, 512)),
)
KINDS = {"gru": (nn.GRU, EpisodicGRU), "lstm": (nn.LSTM, EpisodicLSTM)}
Run = Callable[[], Any]


@dataclass(frozen=True)
class Sizes:
    steps: int = 32
    samples: int = 64
    actors: int = 128
    policy: PolicySizes = field(default_factory=PolicySizes)


SMALL = Sizes(3, 2, 2, PolicySizes(base_planes=16, seen=32, hidden=24, embedding=4))


@dataclass(frozen=True)
class Row:
    """One way: the median of a call in a row of calls, and what of plantune's time it took."""

    what: str
    dtype: str
    way: str
    us: float
    ratio: float = 1.0


def replayed(run: Run) -> Run:
    """The call as a CUDA graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def timed(run: Run) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else (lambda: None)
    wait()
    start = time.perf_counter()
    for _ in range(CALLS):
        run()
    wait()
    return (time.perf_counter() - start) / CALLS * 1e6


def in_turns(what: str, dtype: str, ways: dict[str, Run]) -> Iterator[Row]:
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, run in ways.items():
            times[way].append(timed(run))
    own = times["plantune"]
    for way, found in times.items():
        ratio = median(a / b for a, b in zip(own, found, strict=True))
        yield Row(what, dtype, way, median(found), ratio)


def layer_ways(
    kind: str, dtype: torch.dtype, device: torch.device, shape: tuple[int, ...], mode: str = "train"
) -> dict[str, Run]:
    """Forward and backward of one layer, with the gradients of inputs, state and weights; in mode
    "infer" forward alone.
    """
    steps, samples, hidden = shape
    theirs, ours = (make(hidden, hidden).to(device, dtype) for make in KINDS[kind])
    ours.load_state_dict(theirs.state_dict())
    x, dy = (torch.randn(steps, samples, hidden, device=device) for _ in range(2))
    x, dy = x.to(dtype).requires_grad_(mode == "train"), dy.to(dtype)
    first = [torch.zeros_like(x[:1], requires_grad=mode == "train") for _ in range(2)]
    state = first[0] if kind == "gru" else tuple(first)
    read = [x, *(first[:1] if kind == "gru" else first)]
    tuned = optimize(ours.train(mode == "train"), x, state, mode=mode, fallback="silent")

    def forward(layer: nn.Module) -> Run:
        return torch.no_grad()(lambda: layer(x, state)[0])

    def gradients(layer: nn.Module) -> Run:
        return lambda: torch.autograd.grad(layer(x, state)[0], [*read, *layer.parameters()], dy)

    run = gradients if mode == "train" else forward
    return {"plantune": run(tuned), "cudnn" if x.is_cuda else "eager": run(theirs)}


class Plain(nn.LSTM):
    """torch's own layer in the place of a policy's memory; it knows no episodes."""

    def forward(self, x: Tensor, state: Any, done: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, state)


def plain(policy: Policy) -> Policy:
    made, sizes = deepcopy(policy), policy.sizes
    memory = Plain(sizes.hidden + sizes.embedding, sizes.hidden, sizes.layers)
    memory.load_state_dict(policy.memory.state_dict())
    made.memory = memory.to(policy.action.weight)  # type: ignore[assignment]
    return copied(made.to(memory_format=torch.channels_last))


def seen(steps: int, agents: int, policy: Policy) -> tuple[Any, ...]:
    """Images, actions before them, where episodes begin, and the memory."""
    weight, sizes = policy.action.weight, policy.sizes
    images = torch.randn(steps, agents, sizes.in_channels, 64, 64).to(weight)
    actions = torch.randint(sizes.actions, (steps, agents), device=weight.device)
    return (
        images,
        actions,
        torch.rand(steps, agents, device=weight.device) < 0.02,
        policy.begin(agents),
    )


def acting(policy: Policy, given: argparse.Namespace) -> dict[str, Run]:
    policy, inputs = policy.eval(), seen(1, given.sizes.actors, policy)
    rival = plain(policy)
    tuned = optimize(policy, *inputs, fallback="silent")
    ways: dict[str, Run] = {"plantune": lambda: tuned(*inputs), "eager": lambda: rival(*inputs)}
    if given.compile:
        compiled = torch.compile(rival, mode="reduce-overhead")
        ways["compile"] = lambda: compiled(*inputs)
    return ways


def learning(policy: Policy, given: argparse.Namespace) -> dict[str, Run]:
    """Forward, an actor's and a critic's loss, and the gradients of all parameters."""
    sizes, inputs = given.sizes, seen(given.sizes.steps, given.sizes.samples, policy.train())
    chosen = torch.randint(sizes.policy.actions, inputs[1].shape, device=given.device)
    returns = torch.randn(inputs[1].shape, device=given.device)
    rival = plain(policy)
    tuned = optimize(policy, *inputs, mode="train", fallback="silent")

    def gradients(model: nn.Module) -> Run:
        parameters = list(model.parameters())

        def run() -> tuple[Tensor, ...]:
            logits, values, _ = model(*inputs)
            likely = functional.cross_entropy(logits.flatten(0, 1).float(), chosen.flatten())
            loss = likely + (values.float() - returns).square().mean()
            return torch.autograd.grad(loss, parameters)

        return run

    ways = {"plantune": gradients(tuned), "eager": gradients(rival)}
    if given.compile:
        ways["compile"] = gradients(torch.compile(rival, mode="reduce-overhead"))
    return ways


def captured(ways: dict[str, Run]) -> dict[str, Run]:
    """With replays where a call can be captured; torch.compile has graphs of its own."""
    made = {}
    for way, run in ways.items():
        for _ in range(4):
            run()
        try:
            made[way] = run if way == "compile" else replayed(run)
        except (RuntimeError, PlantuneError) as error:
            print(f"{way} is called, not replayed: {error}", file=sys.stderr)
            made[way] = run
    return made


def study(given: argparse.Namespace) -> list[Row]:
    given.device = torch.device("cuda" if torch.cuda.is_available() and not given.small else "cpu")
    given.sizes = SMALL if given.small else Sizes()
    on_gpu = given.device.type == "cuda"
    torch.manual_seed(0)
    rows: list[Row] = []

    def add(what: str, dtype: str, ways: dict[str, Run]) -> None:
        for row in in_turns(what, dtype, captured(ways) if on_gpu else ways):
            rows.append(row)
            print(json.dumps(asdict(row)), flush=True)
        written(rows, given)

    shape = (given.sizes.steps, given.sizes.samples, given.sizes.policy.hidden)

    def add_layers(dtype: torch.dtype, name: str) -> None:
        for kind in KINDS:
            add(kind, name, layer_ways(kind, dtype, given.device, shape))

    def add_sizes(shape: tuple[int, ...]) -> None:
        for kind, dtype in product(KINDS, (torch.float16, torch.float32)):
            for mode, what in (("train", kind), ("infer", f"{kind} forward")):
                ways = layer_ways(kind, dtype, given.device, shape, mode)
                add(f"{what} {' x '.join(map(str, shape))}", str(dtype)[6:], ways)

    with products_in("ieee"):
        if on_gpu and "layers" in given.only:
            add_layers(torch.float16, "float16")
        if "layers" in given.only:
            add_layers(torch.float32, "float32")
        dtype = torch.float16 if on_gpu else torch.float32
        policy = Policy(given.sizes.policy).to(given.device, dtype)
        for parameter in policy.vision.parameters():  # Fixup begins with zeros
            nn.init.normal_(parameter, std=0.05)
        if "acts" in given.only:
            with torch.no_grad():
                add("policy acts", str(dtype)[6:], acting(deepcopy(policy), given))
        if "learns" in given.only:
            add("policy learns", str(dtype)[6:], learning(policy, given))
        for shape in SHAPES if on_gpu and "sizes" in given.only else ():
            add_sizes(shape)
    if on_gpu and "layers" in given.only:
        with products_in("tf32"):
            add_layers(torch.float32, "float32 with tf32")
    return rows


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Inside, torch multiplies float32 in it: matrices, convolutions and recurrent layers."""
    with ExitStack() as stack:
        for place in (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn):
            stack.enter_context(with_values(place, fp32_precision=precision))
        yield


def shown(rows: list[Row]) -> str:
    lines = [(r.what, r.dtype, r.way, f"{r.us:,.0f}", f"{r.ratio:.2f}") for r in rows]
    return table(("what", "dtype", "way", "us a call", "plantune's time by it"), lines, "lllrr")


def written(rows: list[Row], given: argparse.Namespace) -> None:
    document = {
        "date": datetime.now(UTC).date().isoformat(),
        "environment": environment_of(given.device).to_json(),
        "sizes": asdict(given.sizes),
        "rows": [asdict(row) for row in rows],
    }
    given.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(document, indent=1)
    (given.out / "recurrent_study.json").write_text(text + "\n", encoding="utf-8")


def plotted(rows: list[Row], place: Path) -> None:
    """Each way's time as a part of plantune's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots()
    names = [f"{row.what}, {row.dtype}, {row.way}: {row.us:,.0f} us" for row in rows]
    colors = ["#0072b2" if row.way == "plantune" else "#b0b0b0" for row in rows]
    axes.barh(names[::-1], [1 / row.ratio for row in rows][::-1], color=colors[::-1])
    axes.set_xlabel("time, plantune's is 1")
    figure.savefig(place, dpi=150)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS[:3]))
    parser.add_argument("--compile", action="store_true", help="torch.compile too: a minute more")
    parser.add_argument("--out", type=Path, default=Path())
    return parser.parse_args(argv)


if __name__ == "__main__":
    options = arguments()
    found = study(options)
    print(f"\n{shown(found)}")
    try:
        plotted(found, options.out / "recurrent_study.png")
    except ImportError:
        print("no plot: matplotlib is not installed")
