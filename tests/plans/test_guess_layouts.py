"""Where a guess leaves the layout in which a caller brings images."""

from __future__ import annotations

import pytest
from torch import nn

from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.plans.guess import guessed_plan
from plantune.space.search_space import load_search_space

SPACE = load_search_space("sm90")


class Branches(nn.Module):
    """Of an inception block."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(480, 64, 1), pool

    def forward(self, x):
        return self.conv(x), self.pool(x)


class Narrowed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.half())


class Sums(nn.Module):
    """What torch computes, in any layout."""

    def forward(self, x):
        return x.cumsum(-1)


def config_of(module, type_, family):
    """That of the one step of a family in the guess."""
    plan = guessed_plan(extract(module.half().eval(), type_), SPACE, network="layouts")
    (found,) = [c.candidate.config for c in plan.choices if c.candidate.family == family]
    return dict(found)


@pytest.mark.parametrize(
    ("pool", "size", "layout"),
    [(nn.MaxPool2d(3, 1, 1), 224, "nhwc"), (nn.MaxPool2d(4), 16, "nchw")],
)
def test_a_pool_does_where_that_pays_the_conversion(pool, size, layout):
    """In nchw the large one took 554 us instead of 272 in float16 (H200, 2026-11-29)."""
    image = TensorType((10, 480, size, size), "float16")
    assert config_of(Branches(pool), image, "pool")["layout"] == layout


@pytest.mark.parametrize(("layer", "layout"), [(nn.Conv2d(64, 64, 3), "nhwc"), (Sums(), "nchw")])
def test_a_cast_does_for_layers_that_want_images_so(layer, layout):
    config = config_of(Narrowed(layer), TensorType((8, 64, 32, 32), "float32"), "cast")
    assert config == {"source_layout": "nchw", "layout": layout}
