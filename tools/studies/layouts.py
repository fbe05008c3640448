"""How long images take to change their layout on a GPU, beside torch's copy and a plain copy.

python tools/studies/layouts.py --json layouts.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from plantune.devices.machine import arch_of, environment_of
from plantune.graph.layouts import MEMORY_FORMATS
from plantune.kernels.cuda.image_layout import layout_change
from plantune.space.arch import load_arch

DTYPES = {"f16": torch.float16, "f32": torch.float32, "u8": torch.uint8}
SHAPES = (
    ("f16", (10, 480, 224, 224)),
    ("f32", (4, 672, 224, 224)),
    ("f32", (64, 64, 112, 112)),
    ("f16", (64, 256, 56, 56)),
    ("f16", (256, 1024, 14, 14)),
    ("f32", (256, 1024, 14, 14)),
    ("f16", (256, 2048, 7, 7)),
    ("f16", (256, 24, 112, 112)),
    ("f16", (2048, 11, 64, 64)),
    ("f32", (64, 3, 224, 224)),
    ("f16", (64, 3, 224, 224)),
    ("u8", (64, 3, 224, 224)),
    ("f32", (16, 64, 225, 225)),
    ("f16", (64, 8, 112, 112)),
    ("f16", (128, 3, 64, 64)),
    ("f16", (1, 64, 56, 56)),
)
REPLAYED_BYTES, MOST_CALLS, ROUNDS = 2e9, 50, 15


def median_us(call: Callable[[], Any], calls: int) -> float:
    """Of one of so many calls in a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls * 1e3)
    return statistics.median(times)


def row_of(dtype: str, shape: tuple[int, ...], layout: str) -> dict[str, Any]:
    before = MEMORY_FORMATS["nchw" if layout == "nhwc" else "nhwc"]
    x = torch.randint(0, 100, shape, device="cuda").to(DTYPES[dtype])
    x = x.contiguous(memory_format=before)
    y, z = torch.empty_like(x, memory_format=MEMORY_FORMATS[layout]), torch.empty_like(x)
    change = layout_change(shape, x.dtype, layout, load_arch(arch_of(x.device)))
    calls = max(1, min(MOST_CALLS, int(REPLAYED_BYTES / x.nbytes)))
    row: dict[str, Any] = {"dtype": dtype, "shape": shape, "to": layout, "mib": x.nbytes / 2**20}
    row["copy_us"] = median_us(lambda: z.copy_(x), calls)
    row["torch_us"] = median_us(lambda: y.copy_(x), calls)
    if change is not None:
        y.zero_()
        change.launch(torch.cuda.current_stream().cuda_stream, y, x)
        assert torch.equal(x, y)

        def ours() -> None:
            change.launch(torch.cuda.current_stream().cuda_stream, y, x)

        row["plantune_us"] = median_us(ours, calls)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    for dtype, shape in SHAPES:
        for layout in MEMORY_FORMATS:
            rows.append(row := row_of(dtype, shape, layout))
            print(json.dumps(row), flush=True)
    if given.json is not None:
        told = {"environment": environment_of(torch.device("cuda", 0)).to_json(), "rows": rows}
        given.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
