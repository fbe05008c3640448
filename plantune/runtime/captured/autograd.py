"""The tuned pass as one node of torch's autograd graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from plantune.errors import NoSecondGradient, WeightsChanged
from plantune.graph.graph import Graph
from plantune.graph.passes.differentiate import gradient_name
from plantune.runtime.captured.captured_program import CapturedProgram
from plantune.runtime.captured.own_leaves import leaves_of
from plantune.runtime.captured.program_pool import Loan, ProgramPool
from plantune.runtime.captured.vmaps import Vmap
from plantune.runtime.program.program import Program
from plantune.runtime.watched.live_state import LiveState
from plantune.runtime.watched.torch_internals import unwrapped, without_autocast

# Private, but what torch's own compiled graphs use; without it a loan waits for the collector.
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)

AnyProgram = Program | CapturedProgram
Gradients = dict[str, Tensor]


class TunedPass(torch.autograd.Function):
    """Inputs: the pool, the names of parameters, the graph's inputs, then the parameters.

    The parameters are there so that autograd sends them their gradients; the program reads them
    from the module.
    """

    @staticmethod
    def forward(
        ctx: Any, pool: ProgramPool, names: tuple[str, ...], *inputs_and_parameters: Tensor
    ) -> Any:
        inputs = inputs_and_parameters[: len(inputs_and_parameters) - len(names)]
        loan = pool.lend()
        try:
            outputs = loan.instance.forward(*[x.detach() for x in inputs])
        except BaseException:
            loan.discard()
            raise
        ctx.loan, ctx.names = loan, names
        ctx.versions = _versions(loan)
        graph = loan.instance.program.graph
        # An input that no gradient reads may be overwritten, as in eager.
        named = zip(graph.inputs, inputs, strict=True)
        ctx.save_for_backward(*(x for (name, _), x in named if name in graph.saved))
        ctx.mark_non_differentiable(*_without_gradient(graph, outputs))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *output_gradients: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise NoSecondGradient(
                "plantune has no double backward (create_graph=True); use the module that was "
                "given to optimize for that"
            )
        ctx.saved_tensors  # noqa: B018 - raises where the graph was freed or the input changed
        loan: Loan = ctx.loan
        loan.pool.owned.look()
        if _versions(loan) != ctx.versions:
            raise WeightsChanged(
                "a weight that a gradient reads was changed between forward and backward, so the "
                "gradient would be wrong; step the optimizer after backward, and run forward again"
            )
        program = loan.instance.program
        keeps = _keeps_graph()
        try:
            with without_autocast(loan.pool.device.type):
                gradients = gradients_of(program, output_gradients, again=keeps)
        except BaseException:
            loan.discard()
            raise
        if not keeps:
            program.forget()
            loan.release()
        names = [*[name for name, _ in program.graph.inputs], *ctx.names]
        return (None, None, *map(gradients.get, names))


def gradients_of(
    program: AnyProgram, output_gradients: Sequence[Tensor | None], *, again: bool
) -> Gradients:
    """By the names of inputs and parameters. One that follows from no output that was used has
    none, as in eager: an optimizer leaves its parameter alone.
    """
    graph = program.graph
    if (vmap := Vmap.of(output_gradients)) is not None:
        return _one_by_one(program, output_gradients, vmap, again=again)
    wanted = {name for name, _ in graph.output_gradients}
    seeds: dict[str, Tensor] = {}
    for name, dy in zip(graph.outputs, output_gradients, strict=True):
        seed = gradient_name(name)
        if dy is not None and seed in wanted:
            seeds[seed] = seeds[seed] + dy if seed in seeds else dy
    unused = wanted - seeds.keys()
    if unused:
        place = program.device
        for name, type_ in graph.output_gradients:
            if name in unused:
                seeds[name] = torch.zeros(type_.shape, dtype=type_.torch_dtype, device=place)
    found = program.backward(*(seeds[name] for name, _ in graph.output_gradients), again=again)
    if not unused:
        return found
    return {name: dx for name, dx in found.items() if not unused.issuperset(graph.seeds_of[name])}


def _one_by_one(
    program: AnyProgram, output_gradients: Sequence[Tensor | None], vmap: Vmap, *, again: bool
) -> Gradients:
    """Of many at once, as in autograd.grad(is_grads_batched=True): kernels take one at a time."""
    rows = vmap.taken_apart(output_gradients)
    last = len(rows) - 1
    found = [gradients_of(program, row, again=again or at < last) for at, row in enumerate(rows)]
    return {name: vmap.together([each[name] for each in found]) for name in found[0]}


def _without_gradient(graph: Graph, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Those that depend on nothing that has a gradient, or only on its detached value."""
    wanted = {name for name, _ in graph.output_gradients}
    named = zip(graph.outputs, outputs, strict=True)
    return [output for name, output in named if gradient_name(name) not in wanted]


def _versions(loan: Loan) -> tuple[object, ...]:
    weights: LiveState = loan.instance.read_backward
    return weights.versions()


# Function.apply without its look at each argument, whether a transform of torch.func that has ended
# left it behind: 57 of the 238 us that the host took for a forward pass of ResNet-50 (EPYC,
# 2026-11-23). No transform is under way in a call that a plan answers, and parameters are nobody's
# temporary results.
_apply: Any = super(torch.autograd.Function, TunedPass).apply


def run_with_gradients(
    pool: ProgramPool, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]
) -> tuple[Tensor, ...]:
    """The pool's outputs, connected to `inputs` and `parameters` in autograd."""
    leaves = leaves_of(parameters.values())
    outputs: tuple[Tensor, ...] = _apply(pool, tuple(parameters), *map(unwrapped, inputs), *leaves)
    return outputs
