"""Which configs each case of a table of steps runs on a GPU: few of them, together all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from plantune.base.canonical import Attrs
from plantune.graph.step import Step
from plantune.kernels.cuda.cuda_family import CudaFamily

from ..conftest import step_of
from .conftest import DTYPES, legal

Case = tuple[Any, str]  # a name and a dtype


def few(configs: Sequence[Attrs]) -> list[Attrs]:
    """The first config, and as few others as have every value of every key among them."""
    chosen: list[Attrs] = []
    missing = {pair for config in configs for pair in config.items()}
    while missing:
        news = [len(missing.intersection(config.items())) for config in configs]
        chosen.append(configs[news.index(max(news)) if chosen else 0])
        missing.difference_update(chosen[-1].items())
    return chosen


def shares(legal_in: Mapping[Case, Sequence[Attrs]]) -> dict[Case, list[Attrs]]:
    """Few of each case's legal configs, those first that no earlier case of its dtype runs. What
    none of them has run in the end is run by the last case of that dtype that can.
    """
    met = defaultdict[str, set[Attrs]](set)
    found = {}
    for case, configs in legal_in.items():
        found[case] = few(sorted(configs, key=met[case[1]].__contains__))
        met[case[1]].update(found[case])
    for case in reversed(legal_in):
        left = [config for config in legal_in[case] if config not in met[case[1]]]
        found[case] += left
        met[case[1]].update(left)
    return found


def shares_of(
    family: CudaFamily,
    table: Mapping[Any, Any],
    arch: str,
    dtypes: Sequence[str] = DTYPES,
    make: Callable[[Any, str], Step] = step_of,
) -> dict[Case, list[Attrs]]:
    """The shares of all names of a table in these dtypes; `make` makes their steps."""

    def all_cases() -> Iterator[tuple[Case, list[Attrs]]]:
        for name, dtype in ((name, dtype) for name in table for dtype in dtypes):
            step = make(table[name], dtype)
            yield (name, dtype), [each.config for each in legal(family, step, arch)]

    return shares(dict(all_cases()))
