"""Layers that are read as scans are those that kernels of the arch can run."""

from __future__ import annotations

import pytest

from plantune.kernels.scan_division import Division, Sequence
from plantune.space.recurrent import SAMPLES_MIN, STEPS_MIN, scans_on
from plantune.space.search_space import load_search_space

ONE_STEP = {"gru_scan": 3, "lstm_scan": 4}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("op", ONE_STEP)
def test_each_layer_that_is_read_as_scans_has_a_kernel_for_both_passes(op: str, dtype: str) -> None:
    suits, space = scans_on("sm90"), load_search_space("sm90")
    admitted = [hidden for hidden in range(32, 2049, 32) if suits(op, dtype, 16, 64, hidden)]
    assert {256, 512} <= set(admitted)
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
    ("arch", "dtype", "steps", "samples", "hidden"),
    [
        ("cpu", "float32", 32, 64, 512),
        ("sm80", "float16", 32, 64, 512),
        ("sm90", "float64", 32, 64, 512),
        ("sm90", "float16", STEPS_MIN - 1, 64, 512),
        ("sm90", "float16", 32, SAMPLES_MIN - 1, 512),
        ("sm90", "float16", 32, 64, 128),
        ("sm90", "float16", 32, 64, 320),
        ("sm90", "float32", 32, 64, 1024),
    ],
)
def test_other_layers_stay_torchs(
    arch: str, dtype: str, steps: int, samples: int, hidden: int
) -> None:
    assert not scans_on(arch)("gru_scan", dtype, steps, samples, hidden)
