"""The tuned pass as one node of torch's autograd graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plantune.errors import WeightsChanged
from plantune.graph.differentiate import gradient_name
from plantune.graph.graph import Graph
from plantune.runtime.live_state import LiveState
from plantune.runtime.own_leaves import leaf_of
from plantune.runtime.stock import Lease, Stock
from plantune.runtime.torch_internals import without_autocast

# Private, but what torch's own compiled graphs use; without it a lease waits for the collector.
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


class TunedPass(torch.autograd.Function):
    """Inputs: the stock, the names of parameters, the graph's inputs, then the parameters.

    The parameters are there so that autograd sends them their gradients; the program reads them
    from the module.
    """

    @staticmethod
    def forward(
        ctx: Any, stock: Stock, names: tuple[str, ...], *inputs_and_parameters: Tensor
    ) -> Any:
        inputs = inputs_and_parameters[: len(inputs_and_parameters) - len(names)]
        lease = stock.lease()
        try:
            outputs = lease.instance.forward(*[x.detach() for x in inputs])
        except BaseException:
            lease.discard()
            raise
        ctx.lease, ctx.names = lease, names
        ctx.versions = _versions(lease)
        graph = lease.instance.program.graph
        # An input that no gradient reads may be overwritten, as in eager.
        named = zip(graph.inputs, inputs, strict=True)
        ctx.save_for_backward(*(x for (name, _), x in named if name in graph.saved))
        ctx.mark_non_differentiable(*_without_gradient(graph, outputs))
        return outputs

    @staticmethod
    def backward(ctx: Any, *output_gradients: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "plantune has no double backward (create_graph=True); use the module that was "
                "given to optimize for that"
            )
        ctx.saved_tensors  # noqa: B018 - raises where the graph was freed or the input changed
        lease: Lease = ctx.lease
        lease.stock.held.look()
        if _versions(lease) != ctx.versions:
            raise WeightsChanged(
                "a weight that a gradient reads was changed between forward and backward, so the "
                "gradient would be wrong; step the optimizer after backward, and run forward again"
            )
        program = lease.instance.program
        wanted = {name for name, _ in program.graph.output_gradients}
        seeds: dict[str, Tensor] = {}
        for name, dy in zip(program.graph.outputs, output_gradients, strict=True):
            if gradient_name(name) in wanted:
                seeds[name] = seeds[name] + dy if name in seeds else dy
        keeps = _keeps_graph()
        try:
            with without_autocast(lease.stock.device.type):
                gradients = program.backward(*seeds.values(), again=keeps)
        except BaseException:
            lease.discard()
            raise
        if not keeps:
            program.forget()
            lease.release()
        names = (*(name for name, _ in program.graph.inputs), *ctx.names)
        return (None, None, *(gradients.get(name) for name in names))


def _without_gradient(graph: Graph, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Those that depend on nothing that has a gradient, or only on its detached value."""
    wanted = {name for name, _ in graph.output_gradients}
    named = zip(graph.outputs, outputs, strict=True)
    return [output for name, output in named if gradient_name(name) not in wanted]


def _versions(lease: Lease) -> tuple[object, ...]:
    weights: LiveState = lease.instance.read_backward
    return weights.versions()


def run_with_gradients(
    stock: Stock, inputs: Sequence[Tensor], parameters: dict[str, Tensor]
) -> tuple[Tensor, ...]:
    """The stock's outputs, connected to `inputs` and `parameters` in autograd."""
    outputs: tuple[Tensor, ...] = TunedPass.apply(  # type: ignore[no-untyped-call]
        stock, tuple(parameters), *inputs, *map(leaf_of, parameters.values())
    )
    return outputs
