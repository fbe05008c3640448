"""How many sentences a second a GRU encoder and decoder translates, in several ways.

    python tools/studies/translate.py                       # 1,024 made sentences, batches 1, 8, 64
    python tools/studies/translate.py --small               # on 2 cores of a CPU in two minutes
    python tools/studies/translate.py --pairs eng-fra.txt   # source<TAB>target, a pair a line

Every way translates the same sentences greedily, with the same weights: eager float32 with and
without cuDNN, its steps in one CUDA graph, torch.compile of a step, and plantune.optimize of the
whole. Weights are random, and such that sentences end after different numbers of words: words are
compared with eager's. On a GPU, `replays` are calls of 14 words from 1 and from 14 words, captured
in CUDA graphs and replayed in turns: what the GPU itself takes. Prints tables, and which operators
each way's time goes to, of some sentences at the first batch; writes all into translate_study.json,
and bars into translate_study.png if matplotlib is there, under --out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from plantune import optimize
from plantune.base.scopes import with_values
from plantune.devices.cuda.flags import cudnn
from plantune.devices.machine import environment_of
from plantune.models.gru_translator import (
    BEGIN,
    END,
    MAX_STEPS,
    GRUTranslator,
    Sizes,
    difference,
    greedy,
)
from plantune.report.tables import table

LONGEST = 20  # words of a source sentence
UNKNOWN = 0
REPLAYED_STEPS, ROUNDS, REPLAYS = 14, 15, 20
SMALL = Sizes(source_words=800, target_words=600, embedding=64, hidden=128)
# Added to the logit of the end, and what logits are multiplied by: from one word to all of them.
ENDS, SPREAD = {True: 0.7, False: 1.2}, 2.0
Made = tuple[Tensor, Tensor]
Way = Callable[[Tensor, Tensor], Made]


@dataclass(frozen=True)
class Row:
    """One way at one batch; `wrong` are the sentences whose words differ from eager's, `near` those
    of them where float64 finds two words that float32 cannot tell apart. Each is among the
    `differences`: which sentence, at which word, and by how much eager's has the larger logit.
    """

    way: str
    batch: int
    sentences_per_s: float
    ms_per_call: float
    wrong: int
    near: int
    differences: tuple[tuple[int, int, float], ...] = ()


@dataclass(frozen=True)
class Replay:
    """Sentences of REPLAYED_STEPS words from so many, in one CUDA graph: medians of one replay."""

    batch: int
    source_words: int
    eager_us: float
    plantune_us: float
    ratio: float


def made_sentences(count: int, sizes: Sizes) -> list[list[int]]:
    """Frequent words are small numbers, as in a language."""
    random = torch.Generator().manual_seed(0)
    frequencies = 1 / torch.arange(1.0, sizes.source_words + 1)
    lengths = torch.randint(3, LONGEST + 1, (count,), generator=random).tolist()
    return [
        torch.multinomial(frequencies, n, replacement=True, generator=random).tolist()
        for n in lengths
    ]


def read_sentences(path: Path, count: int, sizes: Sizes) -> list[list[int]]:
    """The first sentences of a file of pairs; its rarest words are one."""
    pairs = path.read_text(encoding="utf-8").splitlines()
    lines = [pair.partition("\t")[0].lower().split() for pair in pairs]
    common = Counter(word for line in lines for word in line).most_common(sizes.source_words - 1)
    numbers = {word: at + 1 for at, (word, _) in enumerate(common)}
    found = [[numbers.get(word, UNKNOWN) for word in line[:LONGEST]] for line in lines if line]
    return found[:count]


def batches(sentences: list[list[int]], batch: int, device: torch.device) -> list[Made]:
    """Padded words (LONGEST, N) and lengths (N,) of whole batches."""
    made = []
    for at in range(0, len(sentences) - batch + 1, batch):
        part = sentences[at : at + batch]
        source = torch.zeros(LONGEST, batch, dtype=torch.int64)
        for n, words in enumerate(part):
            source[: len(words), n] = torch.tensor(words)
        lengths = torch.tensor([len(words) for words in part])
        made.append((source.to(device), lengths.to(device)))
    return made


def translator(sizes: Sizes, device: torch.device) -> GRUTranslator:
    torch.manual_seed(0)
    model = GRUTranslator(sizes).eval()
    with torch.no_grad():
        model.decoder.output.weight.mul_(SPREAD)
        model.decoder.output.bias[END] += ENDS[sizes == SMALL]
    return model.to(device)


def steps_of_eager(model: GRUTranslator, source: Tensor, lengths: Tensor, steps: int) -> Made:
    """Eager's kernels, all steps of them: nothing is read on the host, and what follows the end is
    found afterwards.
    """
    context = hidden = model.encoder(source, lengths)
    words, made = torch.full_like(lengths, BEGIN), []
    for _ in range(steps):
        logits, hidden = model.decoder(words, hidden, context)
        words = logits.argmax(1)
        made.append(words)
    found = torch.stack(made, 1)
    ends = found == END
    after = (ends.cumsum(1) - ends.long()) > 0
    return found.masked_fill(after, END), (~after).sum(1)


def in_a_graph(run: Callable[[], Made]) -> tuple[torch.cuda.CUDAGraph, Made]:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


def captured(model: GRUTranslator, example: Made) -> Way:
    """Eager's steps, all of them, in one CUDA graph."""
    source, lengths = (tensor.clone() for tensor in example)
    graph, results = in_a_graph(lambda: steps_of_eager(model, source, lengths, MAX_STEPS))

    def translate(words: Tensor, counts: Tensor) -> Made:
        source.copy_(words)
        lengths.copy_(counts)
        graph.replay()
        return results[0].clone(), results[1].clone()

    return translate


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / REPLAYS * 1e3


def replayed(model: GRUTranslator, batch: int, source_words: int) -> Replay:
    """Of sentences that do not end before the last step."""
    model = deepcopy(model)
    for layer in (model.encoder.gru, model.decoder.gru):
        layer.flatten_parameters()
    model.decoder.output.bias.data[END] = -1e4
    device = model.decoder.output.bias.device
    source = torch.randint(model.sizes.source_words, (source_words, batch), device=device)
    lengths = torch.full((batch,), source_words, device=device)
    tuned = optimize(model, source, lengths, max_steps=REPLAYED_STEPS, fallback="silent")
    runs: list[Callable[[], Made]] = [
        lambda: steps_of_eager(model, source, lengths, REPLAYED_STEPS),
        lambda: tuned(source, lengths, max_steps=REPLAYED_STEPS),
    ]
    graphs = [in_a_graph(run) for run in runs]
    times = [[replay_us(graph) for graph, _ in graphs] for _ in range(ROUNDS)]
    wanted, made = (results[0] for _, results in graphs)
    if not torch.equal(wanted, made):
        raise SystemExit(f"batch {batch}: {int((wanted != made).any(1).sum())} sentences differ")
    eager, ours = (median(of_way) for of_way in zip(*times, strict=True))
    return Replay(batch, source_words, eager, ours, median(b / a for a, b in times))


def compiled(model: GRUTranslator) -> Way:
    """The decoder's step by torch.compile; words are read on the host after each."""
    step = torch.compile(model.decoder)

    def translate(source: Tensor, lengths: Tensor) -> Made:
        return greedy(_Parts(model.encoder, step), source, lengths)  # type: ignore[arg-type]

    return translate


@dataclass(frozen=True)
class _Parts:
    encoder: Any
    decoder: Any


def ways(model: GRUTranslator, example: Made, named: list[str]) -> Iterator[tuple[str, Way]]:
    """Each is made when its turn comes."""
    on_gpu = example[0].is_cuda

    def eager(source: Tensor, lengths: Tensor) -> Made:
        return greedy(model, source, lengths)

    def without_cudnn(source: Tensor, lengths: Tensor) -> Made:
        with torch.backends.cudnn.flags(enabled=False):
            return greedy(model, source, lengths)

    if "eager" in named:
        yield "eager", eager
    if on_gpu and "eager-without-cudnn" in named:
        yield "eager-without-cudnn", without_cudnn
    if on_gpu and "cuda-graph" in named:
        yield "cuda-graph", captured(model, example)
    if "plantune" in named:
        yield "plantune", optimize(model, *example, fallback="silent")
    if "compile" in named:
        yield "compile", compiled(model)


WAYS = ("eager", "eager-without-cudnn", "cuda-graph", "plantune", "compile")


def measured(
    name: str, way: Way, calls: list[Made], wanted: list[Made], model: GRUTranslator
) -> Row:
    """The second time that the way translates all; the first is for what it has to prepare."""
    batch = len(calls[0][1])
    wait = torch.cuda.synchronize if calls[0][0].is_cuda else (lambda: None)
    made = [way(*call) for call in calls]
    wait()
    start = time.perf_counter()
    for call in calls:
        way(*call)
    wait()
    seconds = time.perf_counter() - start
    found = []
    for at, (call, (got, _), (exact, _)) in enumerate(zip(calls, made, wanted, strict=True)):
        for n in (got != exact).any(1).nonzero()[:, 0].tolist():
            parts = difference(model, call[0][:, n], call[1][n], exact[n], got[n])
            found.append((at * batch + n, parts))
    near = sum(parts.is_tie for _, parts in found)
    listed = tuple((sentence, parts.word, parts.margin) for sentence, parts in found)
    each = seconds / len(calls)
    return Row(name, batch, batch / each, each * 1e3, len(found), near, listed)


def survey(way: Way, calls: list[Made], most: int = 12) -> list[dict[str, Any]]:
    """The operators that a way's own time goes to, a sentence or batch of them."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if calls[0][0].is_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for call in calls:
            way(*call)
    events = sorted(profile.key_averages(), key=lambda e: e.self_cpu_time_total, reverse=True)
    return [
        {
            "operator": event.key,
            "calls": event.count / len(calls),
            "host_us": event.self_cpu_time_total / len(calls),
            "gpu_us": event.self_device_time_total / len(calls),
        }
        for event in events[:most]
    ]


def shown(rows: list[Row]) -> str:
    eager = {row.batch: row.sentences_per_s for row in rows if row.way == "eager"}
    lines = [
        (
            *(str(row.batch), row.way, f"{row.sentences_per_s:,.0f}", f"{row.ms_per_call:.3f}"),
            f"{row.sentences_per_s / eager[row.batch]:.2f}" if row.batch in eager else "",
            f"{row.wrong} ({row.near})",
        )
        for row in rows
    ]
    headers = ("batch", "way", "sentences/s", "ms a call", "of eager's", "wrong (near)")
    return table(headers, lines, "rlrrrr")


def shown_survey(found: dict[str, list[dict[str, Any]]], most: int = 6) -> str:
    lines = [
        (way, e["operator"], f"{e['calls']:.1f}", f"{e['host_us']:.0f}", f"{e['gpu_us']:.0f}")
        for way, events in found.items()
        for e in events[:most]
    ]
    return table(("way", "operator of a call", "calls", "host us", "GPU us"), lines, "llrrr")


def plotted(rows: list[Row], place: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots()
    names = [f"{row.way}, batch {row.batch}" for row in rows]
    colors = ["#0072b2" if row.way == "plantune" else "#b0b0b0" for row in rows]
    axes.barh(names[::-1], [row.sentences_per_s for row in rows][::-1], color=colors[::-1])
    axes.set_xscale("log")
    axes.set_xlabel("sentences a second")
    figure.savefig(place, dpi=150)


@contextmanager
def without_tf32() -> Iterator[None]:
    """Inside, eager's float32 is float32: torch rounds recurrent layers to tf32 by default, which
    makes other words of some sentences.
    """
    with (
        with_values(torch.backends.cuda.matmul, allow_tf32=False),
        with_values(cudnn, allow_tf32=False),
    ):
        yield


def study(given: argparse.Namespace) -> list[Row]:
    device = torch.device("cuda" if torch.cuda.is_available() and not given.small else "cpu")
    sizes = SMALL if given.small else Sizes()
    count = given.sentences or (96 if given.small else 1024)
    sentences = (
        read_sentences(given.pairs, count, sizes) if given.pairs else made_sentences(count, sizes)
    )
    model, rows, found = translator(sizes, device), [], {}
    with torch.no_grad(), without_tf32():
        for batch in given.batch or ([1, 8] if given.small else [1, 8, 64]):
            calls = batches(sentences, batch, device)
            wanted = [greedy(model, *call) for call in calls]
            for name, way in ways(model, calls[0], given.ways):
                rows.append(measured(name, way, calls, wanted, model))
                if name not in found:
                    found[name] = survey(way, calls[:20])
                print(json.dumps(asdict(rows[-1])), flush=True)
        sizes_of_replays = [(n, s) for n in (1, 8, 64) for s in (1, REPLAYED_STEPS)]
        replays = [replayed(model, *each) for each in sizes_of_replays if device.type == "cuda"]
        for replay in replays:
            print(json.dumps(asdict(replay)), flush=True)
    print(f"\n{shown(rows)}\n\n{shown_survey(found)}")
    given.out.mkdir(parents=True, exist_ok=True)
    document = {
        "date": datetime.now(UTC).date().isoformat(),
        "environment": environment_of(device).to_json(),
        "sentences": len(sentences),
    }
    document |= {"rows": [asdict(row) for row in rows], "replays": [asdict(r) for r in replays]}
    text = json.dumps({**document, "survey": found}, indent=1)
    (given.out / "translate_study.json").write_text(text + "\n", encoding="utf-8")
    try:
        plotted(rows, given.out / "translate_study.png")
    except ImportError:
        print("no plot: matplotlib is not installed")
    return rows


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="a small network, on the CPU")
    parser.add_argument("--pairs", type=Path, help="sentence pairs, source<TAB>target")
    parser.add_argument("--sentences", type=int, help="how many of them")
    parser.add_argument("--batch", type=int, nargs="+")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--out", type=Path, default=Path())
    return parser.parse_args(argv)


if __name__ == "__main__":
    study(arguments())
