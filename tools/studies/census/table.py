"""docs/census.md: what the rows say, and each network that is not taken or not right, with why."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median

from rows import Row

COLLECTIONS = ("torchvision", "timm")
MODES = ("infer", "train")
# Of another route's time: more is not luck.
SLOWER = 1.03
# Networks with a smaller share of FLOPs in steps that have a kernel are named.
NAMED = 0.75
TIMES = {
    "time": (
        "## Time without a plan",
        "",
        "The kernels that estimates choose, as a part of another route's time: medians of calls",
        "in turns, the worse of two races; float16, batch 32, the network's own image size.",
        "`cuda-graph` is one graph of eager channels_last, autotuned, that copies no image.",
    ),
    "tuned": (
        "## Time with the plan of a search",
        "",
        "As above, with the plan that a search found: policies/nature has 256 images of bytes",
        "(4x84x84), policies/impala 512 (3x64x64). Routes were compiled while other networks were",
        "searched; `-` is a route that was not compiled. Of a network's races the last with each",
        "route counts. A roofline counts all traffic as that of the GPU's memory: steps whose data",
        "stays in its cache may take less.",
    ),
}
HEAD = """# Census

What plantune takes of torchvision's and timm's classification networks with fewer than 30 million
parameters, in both modes, without a stored plan. `python tools/studies/census` made this file; its
docstring says how.

- **taken**: the network's graph can be made, with its backward pass in mode train.
- **right**: the default plan's program was compared with float64 on random weights: each output,
  running statistic and gradient is off by at most twice what PyTorch's own is, also with inputs
  and weights that differ by a rounding, plus a tolerance (`plantune/base/tolerances.py`). Images of
  64x64, or the smallest size that the network takes, float32.
- **FLOPs with a kernel**: the part of a pass's arithmetic in steps for which a kernel beside the
  framework's is legal on that chip, float16, batch 32, the network's own image size. Nothing was
  timed for it.
"""


def write_table(rows: Iterable[Row], path: Path) -> None:
    path.write_text("\n".join(_lines(list(rows))).rstrip() + "\n", encoding="utf-8")


def _lines(rows: list[Row]) -> Iterator[str]:
    yield HEAD
    yield from _summary(rows)
    yield from _shares(rows)
    yield from _times(rows)
    yield from _causes(rows)
    yield from _refused(rows)


def _summary(rows: list[Row]) -> Iterator[str]:
    yield "## Taken and right"
    yield ""
    yield "| networks | mode | taken | right |"
    yield "| --- | --- | --- | --- |"
    for collection in COLLECTIONS:
        for mode in MODES:
            parts = (_part(rows, verdict, collection, mode) for verdict in ("taken", "right"))
            yield f"| {collection} | {mode} | {' | '.join(parts)} |"
    yield ""


def _part(rows: list[Row], verdict: str, collection: str, mode: str) -> str:
    """How many of those that were asked have this verdict."""
    asked = [
        row
        for row in rows
        if row["measure"] == verdict and row["mode"] == mode
        if row["network"].startswith(f"{collection}/")
    ]
    count = sum(row["verdict"] == verdict for row in asked)
    return f"{count} of {len(asked)} ({count / len(asked):.1%})" if asked else "-"


def _shares(rows: list[Row]) -> Iterator[str]:
    found = [row for row in rows if row["measure"] == "share" and "share" in row]
    if not found:
        return
    yield "## FLOPs with a kernel beside the framework's"
    yield ""
    yield "| networks | mode | chip | known of | median | least | below 0.6 |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for collection in COLLECTIONS:
        for mode in MODES:
            by_arch = defaultdict(list)
            for row in found:
                if row["network"].startswith(f"{collection}/") and row["mode"] == mode:
                    by_arch[row["arch"]].append(row["share"])
            for arch, shares in by_arch.items():
                low = sum(share < 0.6 for share in shares)
                yield (
                    f"| {collection} | {mode} | {arch} | {len(shares)} | {median(shares):.3f} | "
                    f"{min(shares):.3f} | {low} |"
                )
    yield ""
    yield from _least(found)
    yield "Where the rest is, of all these networks' FLOPs without such a kernel, by op:"
    yield ""
    yield from _left(found)
    yield ""


def _least(found: list[Row]) -> Iterator[str]:
    """The networks of which much has no kernel, the worst first."""
    low = sorted((row for row in found if row["share"] < NAMED), key=lambda row: row["share"])
    if not low:
        return
    yield f"Below {NAMED}, and of which ops the rest is, as parts of all FLOPs:"
    yield ""
    yield "| network | mode | share | the rest |"
    yield "| --- | --- | --- | --- |"
    for row in low:
        left = ", ".join(f"`{op}` {part:.2f}" for op, part in row["left"].items() if part >= 0.01)
        yield f"| {row['network']} | {row['mode']} | {row['share']:.3f} | {left} |"
    yield ""


def _left(found: list[Row]) -> Iterator[str]:
    """Each network counts the same, however large it is."""
    for mode in MODES:
        left = Counter[str]()
        for row in found:
            if row["mode"] == mode:
                left.update(row["left"])
        ops = ", ".join(
            f"`{op}` {part / max(left.total(), 1e-9):.2f}" for op, part in left.most_common(8)
        )
        if ops:
            yield f"- {mode}: {ops}"


def _times(rows: list[Row]) -> Iterator[str]:
    """Without a plan, then with one that a search found."""
    for measure, lines in TIMES.items():
        found = dict[tuple[str, str], Row]()
        for row in rows:
            if row["measure"] in (measure, f"{measure} late") and row.get("ratios"):
                key = (row["network"], row["mode"])
                before = found.get(key, {}).get("ratios", {})
                found[key] = {**row, "ratios": {**before, **row["ratios"]}}
        if found:
            yield from lines
            yield ""
            yield from _ratios([*found.values()])
    if any(row["measure"] == "searched" for row in rows):
        yield from _searches(rows)


def _ratios(found: list[Row]) -> Iterator[str]:
    routes = list(dict.fromkeys(route for row in found for route in row["ratios"]))
    yield "| of | mode | networks | median | most | above 1.03 |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for mode in MODES:
        for route in routes:
            ratios = [
                r["ratios"][route][0] for r in found if r["mode"] == mode and route in r["ratios"]
            ]
            if ratios:
                slow = sum(ratio > SLOWER for ratio in ratios)
                numbers = f"{median(ratios):.2f} | {max(ratios):.2f} | {slow}"
                yield f"| {route} | {mode} | {len(ratios)} | {numbers} |"
    yield ""
    yield f"| network | mode | ms | {' | '.join(f'of {route}' for route in routes)} | GPU |"
    yield "| --- | --- | --- | " + "--- | " * len(routes) + "--- |"
    for row in sorted(found, key=lambda row: -row["ratios"].get(routes[0], [0])[0]):
        ratios = [
            f"{row['ratios'][route][0]:.2f}" if route in row["ratios"] else "-" for route in routes
        ]
        start = f"{row['network']} | {row['mode']} | {row['ms']['plantune']:.3f}"
        yield f"| {start} | {' | '.join(ratios)} | {row['device']} |"
    yield ""


def _searches(rows: list[Row]) -> Iterator[str]:
    """How long they took, and what the steps of their plans take beside their rooflines."""
    found = [row for row in rows if row.get("search_s")]
    yield (
        "| searched | budget | took | candidates measured | measured steps of the plan "
        "| their roofline |"
    )
    yield "| --- | --- | --- | --- | --- | --- |"
    for row in found:
        steps = row.get("steps", {})
        sums = [f"{steps[key]:.0f} us" if key in steps else "-" for key in ("us", "roofline_us")]
        times = [f"{row[key]:.0f} s" if key in row else "-" for key in ("budget_s", "search_s")]
        count = row.get("measured", "-")
        yield f"| {row['network']} | {' | '.join(times)} | {count} | {' | '.join(sums)} |"
    yield ""


def _causes(rows: list[Row]) -> Iterator[str]:
    """The most frequent first."""
    causes = Counter((row["mode"], _cause(row["reason"])) for row in _not_right(rows))
    if not causes:
        return
    yield "## Why not"
    yield ""
    yield "| mode | networks | reason |"
    yield "| --- | --- | --- |"
    for (mode, cause), count in causes.most_common():
        yield f"| {mode} | {count} | {cause} |"
    yield ""


def _refused(rows: list[Row]) -> Iterator[str]:
    if not _not_right(rows):
        return
    yield "## Each network that is not taken or not right"
    yield ""
    by_network = defaultdict(list)
    for row in _not_right(rows):
        said = f"{row['mode']}: {row['verdict']}, {_cause(row['reason'])}"
        by_network[row["network"]].append(said)
    for network, reasons in sorted(by_network.items()):
        yield f"- `{network}` {'; '.join(reasons)}"


def _not_right(rows: list[Row]) -> list[Row]:
    """One row for each network and mode."""
    found = {}
    for measure in ("right", "taken"):
        for row in rows:
            if row["measure"] == measure and row["verdict"] != measure:
                found[row["network"], row["mode"]] = row
    return list(found.values())


def _cause(reason: str) -> str:
    """The reason without the network, its places and its figures."""
    text = reason.partition(", at ")[2].partition(": ")[2] or reason
    text = text.partition(" cannot be part of a plan")[0].partition("; /")[0]
    text = re.sub(r"the plan for \S+: ", "", text)
    text = re.sub(r"^\S+ is off by.*", "an output or a gradient is off by more than allowed", text)
    text = re.sub(r"\(/\S+/site-packages/", "(", text)
    return text.replace("|", "\\|").strip(" ,.")[:160]
