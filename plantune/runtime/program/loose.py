"""Which values stay as torch makes them: views, or of any strides, as nothing needs them dense."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from plantune.graph import Graph
from plantune.graph.layouts import moves
from plantune.kernels.resolved import ResolvedStep
from plantune.kernels.weights.pitch import cuts_channels


def loose_values(
    graph: Graph, steps: Sequence[ResolvedStep], layouts: Mapping[str, str]
) -> frozenset[str]:
    """Whatever reads them takes any strides, or slices if they are some, or has them converted.
    Callers get copies of those that are outputs; other results are none of them. `layouts` are
    those of what no step makes.

    In training, views of the network's inputs are copied: a caller may overwrite the inputs before
    the backward pass.
    """
    slices = _channel_slices(steps, layouts)
    kept = {value for _, value in (*graph.updates, *graph.gradients)}
    dense, moving = _read_as_they_are(steps, layouts, slices) | kept, set()
    if graph.backward_from is not None:
        moving = {name for name, _ in (*graph.inputs, *graph.output_gradients)}
    loose: set[str] = set()
    for chosen in steps:
        family, parts, config = chosen.family, chosen.parts, chosen.config
        views = dict(family.aliases(parts, config))
        for name, source in family.leaves_loose(parts, config).items():
            if name not in dense and source not in moving:
                loose.add(name)
                views |= {} if source is None else {name: source}
        moving |= {name for name, source in views.items() if source in moving}
    return frozenset(loose)


def _channel_slices(steps: Sequence[ResolvedStep], layouts: Mapping[str, str]) -> set[str]:
    """Values that torch cuts out of images in nhwc, or out of such slices."""
    layouts = dict(layouts)
    found: set[str] = set()
    others: set[str] = set()
    for chosen in steps:
        family, parts, config = chosen.family, chosen.parts, chosen.config
        made = family.layouts(parts, config)
        layouts |= {name: made.get(name, "nchw") for name, _ in chosen.step.outputs}
        left = family.leaves_loose(parts, config)
        for name, source in left.items():
            if source is None or source in others:
                others.add(name)
                continue
            images = layouts[source] == layouts[name] == "nhwc"
            cuts = images and cuts_channels(chosen.step.nodes[0], chosen.step.types[source])
            (found if cuts else others).add(name)
    return found


def _read_as_they_are(
    steps: Sequence[ResolvedStep], layouts: Mapping[str, str], slices: Collection[str]
) -> set[str]:
    """Values that some kernel reads without a conversion, and not in the strides that they have."""
    layouts, found = dict(layouts), set()
    for chosen in steps:
        family, parts, config = chosen.family, chosen.parts, chosen.config
        demanded = family.layouts(parts, config)
        takes = family.reads_loose(parts, config)
        takes |= family.reads_slices(parts, config).intersection(slices)
        found |= {
            name
            for name, type_ in chosen.step.inputs
            if name not in takes
            and not moves(type_, layouts[name], demanded.get(name, layouts[name]))
        }
        layouts |= {name: demanded.get(name, "nchw") for name, _ in chosen.step.outputs}
    return found
