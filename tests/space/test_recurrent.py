"""Layers that are read as scans are those that kernels of the arch can run, faster than cuDNN."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from plantune.graph.operators.scans import RecurrentLayers
from plantune.kernels.recurrent.scan_division import Division, Sequence
from plantune.space.recurrent import cudnn_algorithm, scans_on
from plantune.space.search_space import load_search_space

ONE_STEP = {"gru_scan": 3, "lstm_scan": 4}
LAYER = RecurrentLayers("lstm_scan", "float16", 32, 64, 512, 512, directions=1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", ONE_STEP)
def test_each_layer_that_is_read_as_scans_has_a_kernel_for_both_passes(op: str, dtype: str) -> None:
    suits, space = scans_on("sm90"), load_search_space("sm90")
    layer = replace(LAYER, op=op, dtype=dtype)
    admitted = [hidden for hidden in range(32, 2049, 32) if suits(replace(layer, hidden=hidden))]
    assert 512 in admitted
    for hidden in admitted:
        sizes = (ONE_STEP[op], 8, 64, hidden, dtype)
        sequence = Sequence(None, {}, *sizes)  # type: ignore[arg-type]
        assert not any(sequence.why_not().values())
        for family, of_gradient in ((op, False), (f"{op}_grad", True)):
            divisions = [
                Division(sequence, config["units"], config["samples"], of_gradient)
                for config in space.configs(family)
            ]
            assert any(not any(d.why_not(space.arch).values()) for d in divisions), (hidden, family)


@pytest.mark.parametrize(
    ("arch", "other"),
    [
        ("cpu", {}),
        ("sm80", {}),
        ("sm90", {"dtype": "float64"}),
        ("sm90", {"steps": 1}),
        ("sm90", {"samples": 1}),
        ("sm90", {"samples": 136}),
        ("sm90", {"op": "gru_scan", "directions": 2, "steps": 15}),
        ("sm90", {"op": "gru_scan", "hidden": 1024, "steps": 15}),
        ("sm90", {"hidden": 1024, "steps": 31}),
        ("sm90", {"hidden": 128}),
        ("sm90", {"hidden": 576}),
        ("sm90", {"dtype": "float32"}),  # cuDNN multiplies in tf32
    ],
)
def test_other_layers_stay_torchs(arch: str, other: dict[str, object]) -> None:
    assert scans_on("sm90")(LAYER)
    assert not scans_on(arch)(replace(LAYER, **other))


def test_what_cudnn_keeps_on_the_chip_is_another_rival() -> None:
    assert cudnn_algorithm(LAYER) == "on chip"
    others = ({"op": "gru_scan"}, {"dtype": "bfloat16"}, {"directions": 2}, {"samples": 20})
    assert {cudnn_algorithm(replace(LAYER, **other)) for other in others} == {"16 bits"}
    assert cudnn_algorithm(replace(LAYER, dtype="float32")) == "float32"


@pytest.mark.parametrize(
    ("op", "least"), [("gru_scan", (8, 16, 256)), ("lstm_scan", (16, 64, 256))]
)
def test_they_begin_at_the_sizes_that_the_guide_names(op: str, least: tuple[int, int, int]) -> None:
    sizes = dict(zip(("steps", "samples", "hidden"), least, strict=True))
    layer, suits = replace(LAYER, op=op, **sizes), scans_on("sm90")
    assert suits(layer)
    for less in ({"steps": least[0] - 1}, {"samples": least[1] - 8}, {"hidden": least[2] - 128}):
        assert not suits(replace(layer, **less)), less


SIZES = Path(__file__).parents[2] / "benchmarks" / "h200" / "2026-11-23-recurrent-sizes.json"


def test_layers_that_are_read_as_scans_were_faster_where_they_were_timed() -> None:
    """In training and in inference; and most of those that were faster are read so."""
    suits, rows = scans_on("sm90"), json.loads(SIZES.read_text())["rows"]
    taken, left = [], []
    for row in rows:
        sizes = {key: row[key] for key in ("dtype", "steps", "samples", "hidden")}
        layer = replace(LAYER, op=f"{row['kind']}_scan", inputs=row["hidden"], **sizes)
        (taken if suits(replace(layer, directions=row["layers"])) else left).append(row["ratio"])
    assert len(taken) > 40
    assert max(taken) < 1
    assert sum(ratio < 0.9 for ratio in left) < len(taken) / 8
