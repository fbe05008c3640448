"""The rows of the study: how each takes its steps, and where its images come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ways

HOST, PINNED, DEVICE = "host", "pinned", "device"


@dataclass(frozen=True)
class Variant:
    """`make` gets a setting and one whole batch; `fused` is for torch's optimizers."""

    name: str
    make: Callable[..., Any]
    data: str = DEVICE
    benchmark: bool = True
    channels_last: bool = True
    fused: bool = True
    on_gpu_alone: bool = False


def _plain(name: str, **given: Any) -> Variant:
    """As the first rows were written, but for what is given."""
    settings = {"data": HOST, "benchmark": False, "channels_last": False, "fused": False}
    return Variant(name, **{"make": ways.eager, **settings, **given})


VARIANTS = {
    variant.name: variant
    for variant in (
        _plain("baseline"),
        _plain("pinned", data=PINNED),
        _plain("cudnn-benchmark", benchmark=True),
        _plain("torchscript", make=ways.traced),
        _plain("all-three", make=ways.traced, data=PINNED, benchmark=True),
        Variant("compile", ways.compiled),
        Variant("compile-max-autotune", ways.autotuned),
        Variant("cuda-graph", ways.captured, on_gpu_alone=True),
        Variant("plantune", ways.tuned),
        Variant("plantune-step", ways.whole),
    )
}
OURS = frozenset(name for name in VARIANTS if name.startswith("plantune"))
# Minutes of compiling, which has to be asked for.
SLOW = frozenset(("compile-max-autotune",))


def chosen(names: list[str] | None, workload: str, *, on_gpu: bool) -> list[Variant]:
    """Those that are named, else what such a run is about; the baseline comes first."""
    if names is None:
        names = [name for name in VARIANTS if name not in SLOW]
        if not on_gpu:  # inductor compiles C++ for a minute there
            names.remove("compile")
        if workload.startswith("airbench"):
            names = [n for n in names if VARIANTS[n].data == DEVICE or n == "baseline"]
    found = [variant for name, variant in VARIANTS.items() if name in names]
    return [variant for variant in found if on_gpu or not variant.on_gpu_alone]
