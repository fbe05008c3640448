"""Which values stay as torch makes them: views, or of any strides, as nothing needs them dense."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from plantune.graph import Graph, Step
from plantune.graph.layouts import moves
from plantune.kernels.family import Candidate
from plantune.kernels.registry import family_named
from plantune.kernels.weights.pitch import cuts_channels

Chosen = Sequence[tuple[Step, Candidate]]


def loose_values(graph: Graph, chosen: Chosen, layouts: Mapping[str, str]) -> frozenset[str]:
    """Whatever reads them takes any strides, or slices if they are some, or has them converted.
    Callers get copies of those that are outputs; other results are none of them. `layouts` are
    those of what no step makes.

    In training, views of the network's inputs are copied: a caller may overwrite the inputs before
    the backward pass.
    """
    slices = _channel_slices(chosen, layouts)
    kept = {value for _, value in (*graph.updates, *graph.gradients)}
    dense, moving = _read_as_they_are(chosen, layouts, slices) | kept, set()
    if graph.backward_from is not None:
        moving = {name for name, _ in (*graph.inputs, *graph.output_gradients)}
    loose: set[str] = set()
    for step, candidate in chosen:
        family = family_named(candidate.family)
        parts = family.parts(step)
        views = dict(family.aliases(parts, candidate.config))
        for name, source in family.leaves_loose(parts, candidate.config).items():
            if name not in dense and source not in moving:
                loose.add(name)
                views |= {} if source is None else {name: source}
        moving |= {name for name, source in views.items() if source in moving}
    return frozenset(loose)


def _channel_slices(chosen: Chosen, layouts: Mapping[str, str]) -> set[str]:
    """Values that torch cuts out of images in nhwc, or out of such slices."""
    layouts = dict(layouts)
    found: set[str] = set()
    others: set[str] = set()
    for step, candidate in chosen:
        family = family_named(candidate.family)
        parts = family.parts(step)
        made = family.layouts(parts, candidate.config)
        layouts |= {name: made.get(name, "nchw") for name, _ in step.outputs}
        left = family.leaves_loose(parts, candidate.config)
        for name, source in left.items():
            if source is None or source in others:
                others.add(name)
                continue
            images = layouts[source] == layouts[name] == "nhwc"
            cuts = images and cuts_channels(step.nodes[0], step.types[source])
            (found if cuts else others).add(name)
    return found


def _read_as_they_are(
    chosen: Chosen, layouts: Mapping[str, str], slices: Collection[str]
) -> set[str]:
    """Values that some kernel reads without a conversion, and not in the strides that they have."""
    layouts, found = dict(layouts), set()
    for step, candidate in chosen:
        family = family_named(candidate.family)
        parts = family.parts(step)
        demanded = family.layouts(parts, candidate.config)
        takes = family.reads_loose(parts, candidate.config)
        takes |= family.reads_slices(parts, candidate.config).intersection(slices)
        found |= {
            name
            for name, type_ in step.inputs
            if name not in takes
            and not moves(type_, layouts[name], demanded.get(name, layouts[name]))
        }
        layouts |= {name: demanded.get(name, "nchw") for name, _ in step.outputs}
    return found
