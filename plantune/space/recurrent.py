"""Which recurrent layers of torch's are read as scans (plantune/graph/operators/scans.py):
those for which an arch has kernels that are faster than the framework's layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from plantune.graph.operators.scans import RecurrentLayers
from plantune.space.search_space import load_search_space

Scans = Callable[[RecurrentLayers], bool]
# Hidden units by dtype: whole products for each of a block's warps, and what registers hold.
UNITS = {"float16": (128, 1024), "bfloat16": (128, 1024)}


class Least(NamedTuple):
    steps: int
    samples: int
    hidden: int


# From which sizes on scans are faster than cuDNN's layer, by what that is: with gradients and
# forward alone, in CUDA graphs in turns (benchmarks/h200/2026-11-23-recurrent-sizes.json). Where
# cuDNN keeps weights on the chip it wins with 16 samples (0.61 to 0.98 of our time), and with 8
# steps of 64 samples and 512 units (0.90); from the sizes below on ours take 0.47 to 0.91 of its
# time. Of its other algorithms they take 0.42 to 0.98 with gradients, 0.36 to 0.72 without. In
# float32 32 steps of 64 samples and 512 units took 0.93 (GRU) and 1.03 (LSTM), forward alone 1.08
# and 1.13: cuDNN multiplies in tf32 there, so these stay torch's.
LEAST = {"on chip": Least(16, 64, 256), "16 bits": Least(8, 16, 256)}
# Of several layers or directions, and of more units, where nothing was timed: longer ones, since
# each step gains.
UNITS_TIMED = 512
LEAST_UNTIMED = {"on chip": Least(32, 64, 512), "16 bits": Least(16, 16, 256)}
# More take further launches, and were not timed: from 64 to 128, 32 steps of a bfloat16 LSTM of 512
# units went from 0.67 to 0.88 of cuDNN's time with gradients.
MOST_SAMPLES = 128


def cudnn_algorithm(layers: RecurrentLayers) -> str:
    """Which of cuDNN's algorithms torch uses for these layers: of one LSTM layer in float16 the
    weights stay on the chip (use_persist_common_heuristics in torch's cudnn/RNN.cpp).
    """
    if layers.dtype == "float32":
        return "float32"
    whole = not (layers.samples % 8 or layers.hidden % 128 or layers.inputs % 128)
    small = layers.samples <= 128 and layers.hidden <= 1024 and layers.directions == 1
    kept = layers.op == "lstm_scan" and layers.dtype == "float16" and whole and small
    return "on chip" if kept else "16 bits"


def scans_on(arch: str) -> Scans:
    """Whether layers are read as scans on a GPU of the arch."""
    families = load_search_space(arch).families

    def suits(layers: RecurrentLayers) -> bool:
        if not {layers.op, f"{layers.op}_grad"} <= set(families) or layers.dtype not in UNITS:
            return False
        multiple, most = UNITS[layers.dtype]
        timed = layers.directions == 1 and layers.hidden <= UNITS_TIMED
        least = (LEAST if timed else LEAST_UNTIMED).get(cudnn_algorithm(layers))
        if least is None or layers.hidden > most or layers.hidden % multiple:
            return False
        if layers.samples > MOST_SAMPLES:
            return False
        sizes = (layers.steps, layers.samples, layers.hidden)
        return all(size >= enough for size, enough in zip(sizes, least, strict=True))

    return suits
