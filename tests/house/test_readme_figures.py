"""Figures of README and docs/results.md are those of the file of their own row or paragraph."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from statistics import mean, median
from typing import Any

import pytest

from ..conftest import ROOT

FIGURE = re.compile(r"\*\*(\d+\.\d+)(?: ms)?\*\*")
LINK = re.compile(r"\((?:\.\./)?(benchmarks/[^)]+\.json)\)")
NETWORK = re.compile(r"(\w+), (?:(\d+) channels|\d+x\d+)")
SEARCHES = {
    "EPYC without AVX-512": "cpu-three-searches",
    "EPYC with AVX-512": "cpu-epyc-avx512-three-searches",
    "Intel Xeon": "cpu-xeon-three-searches",
}
RECURRENT, SMALL_IMAGES = "Recurrent networks", "Training on small images"
PASSES = "Training on a GPU"
GPUS = {"NVIDIA H200": "h200", "NVIDIA H100": "h100"}
LAYOUTS = "Images between layouts"
LARGE = "Large images"
ESTIMATES = "divided by estimated ones"
COMPARED = (*GPUS, RECURRENT, SMALL_IMAGES, PASSES, LAYOUTS, LARGE, ESTIMATES, *SEARCHES)
KEYS = ("ratio", "ratio_live", "median", "median_ms", "of_one", "of_best_ddp")
ENDS = ("low", "high")
README = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "docs" / "results.md").read_text()
NUMBER = re.compile(r"\d[\d,.]*\d|\d")


def read(name: str) -> Any:
    return json.loads((ROOT / name).read_text())


def tables(text: str = RESULTS) -> Iterator[tuple[str, list[list[str]]]]:
    """What stands before each table, and the cells of its rows; nothing is bold in them."""
    before = ""
    for part in text.split("\n\n"):
        if not part.startswith("|"):
            before = part
            continue
        rows = part.replace("**", "").splitlines()[2:]
        yield before, [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]


def rows_of(word: str) -> list[list[str]]:
    """Those of the one table before which the word stands."""
    (rows,) = [rows for before, rows in tables() if word in before]
    return rows


def ms(value: float) -> str:
    """Three digits that count; of less than a tenth of a millisecond the microseconds."""
    return f"{value:.3f}" if value < 1 else f"{value:#.3g}"


def span(values: list[float], digits: str) -> str:
    return f"{min(values):{digits}} to {max(values):{digits}}"


def span_of_plans(values: list[float]) -> str:
    """One figure where plans have it in common."""
    low, high = span(values, ".2f").split(" to ")
    return low if low == high else f"{low} to {high}"


def on_a_gpu(cells: list[str], folder: str = "h200") -> list[str]:
    """The row as the bench of its network, channels and batch says."""
    name, channels = NETWORK.fullmatch(cells[0]).groups()  # type: ignore[union-attr]
    end = f"{name}-batch{cells[1]}-c{channels or 3}.json"
    (file,) = (ROOT / "benchmarks" / folder).glob(f"*-{end}")
    bench = json.loads(file.read_text())
    rows = {row["name"]: row for row in bench["rows"]}
    own, best = rows["plantune"], rows[bench["best_baseline"]]
    rival = best["name"].replace("compile-reduce", "reduce")
    own_call, best_call = (row["latency_ms"]["fresh"]["p50"] for row in (own, best))
    return [
        *cells[:2],
        f"{ms(own['median_ms'])} ms",
        f"{rival} {ms(best['median_ms'])} ms",
        f"{bench['ratio']:.2f} ({span([bench['interval'][end] for end in ENDS], '.2f')})",
        f"{own_call:.3f} of {ms(best_call)} ms",
        f"{ms(rows['cuda-graph']['median_ms'])} ms",
    ]


def on_two_cores(name: str, cells: list[str]) -> list[str]:
    """The row as the newest race of three searches' plans at its batch says."""
    files = sorted((ROOT / "benchmarks").glob(f"????-??-??-{name}-batch{cells[0]}.json"))
    race = json.loads(files[-1].read_text())
    times = {row["name"]: row["median_ms"] for row in race["rows"]}
    plans = sorted(f"plan {name}" for name in race["plans"])
    frozen = [f"{plan}, frozen" for plan in plans]
    rivals = (name for name in times if name not in (*plans, *frozen, "compile-frozen"))
    best = min(rivals, key=times.__getitem__)

    def against(names: list[str], rival: str) -> str:
        return span_of_plans([race["ratios"][name][rival]["ratio"] for name in names])

    return [
        cells[0],
        f"{span([times[plan] for plan in plans], '#.3g')} ms",
        f"{race['spread']['ratio']:.2f}",
        f"{best}, {against(plans, best)}",
        against(plans, "compile-frozen"),
        against(frozen, "compile-frozen"),
        f"{ms(times['eager'])} ms" if "eager" in times else "-",
    ]


@pytest.mark.parametrize("gpu", GPUS)
def test_rows_of_a_gpu_are_those_of_their_benches(gpu: str) -> None:
    rows = rows_of(gpu)
    assert [on_a_gpu(row, GPUS[gpu]) for row in rows] == rows


@pytest.mark.parametrize("machine", SEARCHES)
def test_rows_of_two_cores_are_those_of_their_race(machine: str) -> None:
    rows = rows_of(machine)
    assert [on_two_cores(SEARCHES[machine], row) for row in rows] == rows


def translator_rows() -> Iterator[list[str]]:
    """Sentences a second, beside the fastest other route."""
    rows = read("benchmarks/h200/2026-11-23-translate-study.json")["rows"]
    for own in (row for row in rows if row["way"] == "plantune"):
        others = [row for row in rows if row["batch"] == own["batch"] and row is not own]
        best = max(others, key=lambda row: row["sentences_per_s"])
        many = f"{own['batch']} sentences" if own["batch"] > 1 else "a sentence"
        yield [
            f"translator, float32, {many} at once",
            f"{own['sentences_per_s']:,.0f} a second",
            f"{best['way']} {best['sentences_per_s']:,.0f} a second",
            f"{best['sentences_per_s'] / own['sentences_per_s']:.2f}",
        ]


def layer_rows() -> Iterator[list[str]]:
    """Forward and backward, by medians."""
    rows = read("benchmarks/h200/2026-11-23-recurrent-study.json")["rows"]
    for own, other in zip(rows[::2], rows[1::2], strict=True):
        assert (own["way"], other["way"]) == ("plantune", "cudnn")
        what = f"{own['what'].upper()} layer, {own['dtype']}"
        ours, theirs = (f"{row['us']:,.0f} us" for row in (own, other))
        yield [what, ours, f"cuDNN {theirs}", f"{other['ratio']:.2f}"]


def policy_rows() -> Iterator[list[str]]:
    rows = read("benchmarks/h200/2026-11-23-policy.json")["rows"]
    for own, other in zip(rows[::2], rows[1::2], strict=True):
        ours, theirs = (f"{row['us']:,.0f} us" for row in (own, other))
        what, way = f"{own['what']}, {own['dtype']}", f"{other['way']} {theirs}"
        yield [what, ours, way, f"{other['ratio']:.2f}"]


def test_rows_of_recurrent_networks_are_those_of_their_files() -> None:
    assert [*translator_rows(), *layer_rows(), *policy_rows()] == rows_of(RECURRENT)


def cifar_rows() -> Iterator[list[str]]:
    """Whole steps in turns."""
    for network in ("resnet50", "airbench94"):
        found = read(f"benchmarks/h200/2026-11-23-cifar-{network}-step.json")
        race, ratio = found["race"], found["race"]["ratios"]["plantune-step"]
        best = race["best_rival"]
        own, theirs = (ms(race["rows"][way]["median_ms"]) for way in ("plantune-step", best))
        within = span([ratio[end] for end in ENDS], ".2f")
        what, ours = f"{network}, {found['batch']} images", f"{own} ms"
        yield [what, ours, f"{best} {theirs} ms", f"{ratio['ratio']:.2f} ({within})"]


def test_rows_of_small_images_are_those_of_their_races() -> None:
    assert [*cifar_rows()] == rows_of(SMALL_IMAGES)


TRAINED = {
    "se_resnet9_fixup, 2,048 images": ("se_resnet9_fixup-batch2048-train", "batch2048-step"),
    "se_resnet9_fixup, 8,192 of 11 channels": ("se_resnet9_fixup-batch8192-c11-train",),
    "resnet50, 128 of 32x32": ("resnet50-batch128-32x32-step",),
}


def training_rows() -> Iterator[list[str]]:
    """Both passes, or whole steps with an optimizer."""
    for what, files in TRAINED.items():
        for file in files:
            (path,) = (ROOT / "benchmarks" / "h200").glob(f"2026-11-2[34]-*{file}.json")
            bench = json.loads(path.read_text())
            rows = {row["name"]: row for row in bench["rows"]}
            own, best = rows["plantune"], rows[bench["best_baseline"]]
            rival = best["name"].removeprefix("compile-")
            whole = "optimizer" in bench["workload"]
            yield [
                f"{what}, {'whole step' if whole else 'passes'}",
                f"{ms(own['median_ms'])} ms",
                f"{rival} {ms(best['median_ms'])} ms",
                f"{bench['ratio']:.2f} ({span([bench['interval'][end] for end in ENDS], '.2f')})",
                f"{own['peak_mib']:,.0f} of {best['peak_mib']:,.0f} MiB",
            ]


def test_rows_of_training_are_those_of_their_benches() -> None:
    assert [*training_rows()] == rows_of(PASSES)


def layout_rows() -> Iterator[list[str]]:
    """What a copy of images takes, and what changes their layout takes."""
    dtypes, layouts = {"f16": "float16", "f32": "float32", "u8": "uint8"}, {"nhwc": "channels_last"}
    for row in read("benchmarks/h200/2026-11-28-layouts.json")["rows"]:
        took = (row[name] for name in ("copy_us", "torch_us", "plantune_us"))
        images = f"{'x'.join(map(str, row['shape']))}, {dtypes[row['dtype']]}"
        yield [images, layouts.get(row["to"], row["to"]), *(f"{us:,.1f}" for us in took)]


def test_rows_of_layouts_are_those_of_their_file() -> None:
    every = [*layout_rows()]
    assert all(row in every for row in rows_of(LAYOUTS))


def large_image_rows() -> Iterator[list[str]]:
    """Microseconds of kernels beside their bound and other routes."""
    for row in read("benchmarks/h200/2026-11-29-large-images.json")["rows"]:
        took = (row[f"{name}_us"] for name in ("bound", "torch", "inductor", "plantune"))
        images = f"{row['what']}, {'x'.join(map(str, row['shape']))}, {row['dtype']}"
        yield [images, *("" if us is None else f"{us:,.0f}" for us in took)]


def test_rows_of_large_images_are_those_of_their_file() -> None:
    assert rows_of(LARGE) == [*large_image_rows()]


def estimate_rows() -> Iterator[list[str]]:
    """By family: measured times divided by estimated ones."""
    parts: dict[str, list[float]] = {}
    for row in read("benchmarks/h200/2026-11-29-estimates.json")["rows"]:
        parts.setdefault(row["family"], []).append(row["us"] / row["estimate_us"])
    for family, found in parts.items():
        figures = (median(found), min(found), max(found))
        yield [family, str(len(found)), *(f"{figure:.2f}" for figure in figures)]


def test_rows_of_estimates_are_those_of_their_file() -> None:
    assert rows_of(ESTIMATES) == [*estimate_rows()]


def values(document: Any) -> Iterator[float]:
    """The medians and ratios of a file."""
    if isinstance(document, list):
        for part in document:
            yield from values(part)
    elif isinstance(document, dict):
        yield from (document[k] for k in KEYS if isinstance(document.get(k), float))
        for part in document.values():
            yield from values(part)


def paragraphs() -> list[str]:
    """Those outside of tables with bold figures."""
    parts = (README + RESULTS).split("\n\n")
    return [part for part in parts if not part.startswith("|") and FIGURE.search(part)]


@pytest.mark.parametrize("paragraph", paragraphs(), ids=lambda text: text[:30])
def test_a_paragraph_names_the_file_of_its_bold_figures(paragraph: str) -> None:
    known = [value for name in LINK.findall(paragraph) for value in values(read(name))]
    for figure in FIGURE.findall(paragraph):
        digits = len(figure.partition(".")[2])
        assert any(f"{value:.{digits}f}" == figure for value in known), figure


def test_every_table_is_compared() -> None:
    assert all(sum(word in before for word in COMPARED) == 1 for before, _ in tables())
    assert len(list(tables())) == len(COMPARED)
    assert paragraphs()


def test_headlines_are_rows_of_the_results() -> None:
    """Each figure beside its name stands in one row of docs/results.md."""
    (headlines,) = [rows for before, rows in tables(README) if "interleaved" in before]
    known = [set(NUMBER.findall(" ".join(row))) for _, rows in tables() for row in rows]
    for _, *cells in headlines:
        figures = set(NUMBER.findall(" ".join(cells)))
        assert figures
        assert any(figures <= row for row in known), cells


def test_the_headline_of_two_cores_is_beside_the_fastest_route() -> None:
    """Whatever that promises, also if it needs a compiler."""
    race = read("benchmarks/2026-11-28-cpu-epyc-avx512-three-searches-batch4.json")
    times = {row["name"]: row["median_ms"] for row in race["rows"]}
    ways = [name for name in times if not name.startswith("plan ")]
    best = min(ways, key=times.__getitem__)
    plans = [f"plan {plan}" for plan in race["plans"]]
    ratios = span_of_plans([race["ratios"][plan][best]["ratio"] for plan in plans])
    *low, high = ratios.split(" to ")
    text = " to ".join([*low, f"**{high}**"])
    (line,) = [line for line in README.splitlines() if "two cores of an EPYC |" in line]
    assert line.endswith(f"| {best} | {text} |")


def test_on_two_cores_both_kinds_of_rivals_are_told_at_every_batch() -> None:
    rows = {row[0]: row for row in rows_of("EPYC with AVX-512")}
    assert rows.keys() == {"1", "4", "8", "32"}
    text = " ".join(README.split())

    def across(batches: list[str], column: int) -> str:
        found = [float(x) for b in batches for x in re.findall(r"\d\.\d\d", rows[b][column])]
        return span_of_plans(found)

    of_frozen, of_others = ([across([*b], c) for b in ("1", ("4", "8", "32"))] for c in (4, 3))
    assert (
        f"{of_frozen[0]} of compile-frozen's time with one image and {of_frozen[1]} with 4 or "
        f"more; of the best route that needs no compiler {of_others[0]}, and {of_others[1]}."
    ) in text


def test_what_runs_without_a_plan_is_told_with_the_worst_of_its_networks() -> None:
    name = "benchmarks/h200/2026-11-23-guess-beside-compile.jsonl"
    found = [json.loads(line) for line in (ROOT / name).read_text().splitlines()]
    ratios = {row["network"]: row["ratios"] for row in found}
    graphs = [r["cuda-graph"] for n, r in ratios.items() if n.startswith("torchvision/")]
    *compiled, worst = sorted(r["compile-reduce-overhead"] for r in ratios.values())
    text = " ".join(README.split())
    assert (len(graphs), len(compiled)) == (7, 9)
    assert f"CUDA graph, it took {span(graphs, '.2f')} for seven networks of torchvision" in text
    assert f"nine of ten networks took {span(compiled, '.2f')}, and swin_t {worst:.2f}" in text


def test_what_single_calls_take_is_what_their_file_says() -> None:
    name = "benchmarks/h200/2026-11-28-calls.jsonl"
    (text,) = [" ".join(part.split()) for part in RESULTS.split("\n\n") if "bare launches" in part]
    (told,) = [
        " ".join(part.split()) for part in RESULTS.split("\n\n") if "64 inputs in turns a" in part
    ]
    rows = [json.loads(line) for line in (ROOT / name).read_text().splitlines()]
    calls = {(row["workload"]["model"], row["workload"]["batch"]): row for row in rows}
    host = {key: row["host_us"]["same input"] for key, row in calls.items()}
    few = [host["se_resnet9_fixup", batch] for batch in (1, 32, 128)]
    assert f"needed {span(few, '.1f')} us for a call in a row" in text
    many, of_18 = host["se_resnet9_fixup", 1024], host["resnet18", 16]
    assert f"{many:.1f} at 1024, {of_18:.1f} for resnet18 with 16 images" in text
    assert f"and {host['resnet50', 32]:.1f} for resnet50" in text
    turns = [row["queued"]["inputs in turns"]["ratio"] for row in calls.values()]
    assert f"in turns a call takes {span(turns, '.2f')} of its time on the same one" in told
    assert all(f"{ratio:.3f}" in told for ratio in turns)
    of_many, of_one = (calls["se_resnet9_fixup", n]["late"] for n in (128, 1))
    for late, words in ((of_many, "{:,} single calls at batch 128"), (of_one, "{:,} at batch 1")):
        own = late["same input"]
        assert words.format(own["calls"]) in text
        assert f"{own['p99.9_by_p50']:.2f}" in text
        assert f"{late['bare replay']['p99.9_by_p50']:.2f}" in text
        assert f"{late['bare replay']['p50_us']:.0f}" in text
    firsts = (read(link)["seconds"] for link in LINK.findall(text) if "first-output" in link)
    assert [f"{seconds:.1f} s" in text for seconds in firsts] == [True, True]


@pytest.mark.parametrize("network", ["airbench94", "resnet50"])
def test_accuracies_in_pairs_are_those_of_their_runs(network: str) -> None:
    name = f"benchmarks/h200/2026-11-23-cifar-{network}-pairs.json"
    (text,) = [" ".join(part.split()) for part in RESULTS.split("\n\n") if name in part]
    found = read(name)["pairs"]
    theirs, own = (
        100 * mean(run["accuracy"] for run in found["runs"][way])
        for way in ("cuda-graph", "plantune-step")
    )
    apart = found["differences"]["plantune-step"]["accuracy"]
    assert apart["kept"]
    assert (
        f"{own:.2f} % beside {theirs:.2f} % in {len(found['seeds'])} pairs, "
        f"{100 * abs(apart['mean']):.2f} points apart with a standard error of "
        f"{100 * apart['standard_error']:.2f} ([JSON](../{name}))"
    ) in text
