"""What the census asks of one network: each function returns what it adds to the network's row."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import networks
import speed
import torch
from asked import Asked, Row
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from plantune import check, optimize
from plantune.base.tolerances import tolerance
from plantune.devices.machine import environment_of
from plantune.errors import CannotJudge, UnsupportedModule, WrongResult
from plantune.graph.fusions import all_fusions, groups_from
from plantune.graph.graph import Graph, Node
from plantune.graph.ops import op_named
from plantune.graph.ops.overload import OverloadBackward, OverloadOp
from plantune.graph.partition import why_not_group
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.step import Step, make_step, phase_of
from plantune.graph.tracing.arguments import type_of
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.kernels.registry import all_families
from plantune.plans.checked_plan import check_plan
from plantune.plans.guess import framework_plan
from plantune.runtime.proof.recheck import recheck
from plantune.space.search_space import SearchSpace, load_search_space

# They move no arithmetic, and a view is not a kernel.
NOT_OURS = ("framework", "view")
# A smaller part of the FLOPs is not worth looking through all groups that it could be in.
COUNTS = 1e-3
SEED = 2


def size(name: str, asked: Asked) -> Row:
    return {"verdict": "known", "parameters": networks.parameters(name)}


def taken(name: str, asked: Asked) -> Row:
    """Whether its graph can be made, at its own image size; nothing runs."""
    row, graph = _graph(name, asked)
    return row if graph is None else {**row, "nodes": len(graph.nodes)}


def right(name: str, asked: Asked) -> Row:
    """Whether the default plan's program computes the network, by the proof that each plan passes:
    outputs, running statistics and gradients on random weights.
    """
    return _judged(name, asked, _proved)


def called(name: str, asked: Asked) -> Row:
    """`right`, then one call as users make it, on the network's own weights."""
    return _judged(name, asked, _compared)


def _judged(name: str, asked: Asked, judge: Callable[[str, nn.Module, Tensor, str], Row]) -> Row:
    module, x = networks.fitting(name, asked.image_size, asked.batch)
    module = module.to(asked.device, asked.dtype).train(asked.mode == "train")
    x = x.to(asked.device, asked.dtype)
    row: Row = {"image": x.shape[-1]}
    try:
        return {**row, **judge(name, module, x, asked.mode)}
    except UnsupportedModule as error:
        return {**row, "verdict": "refused", "reason": str(error)}
    except WrongResult as error:
        return {**row, "verdict": "wrong", "reason": str(error)}
    except CannotJudge as error:
        return {**row, "verdict": "not judged", "reason": str(error)}


def _proved(name: str, module: nn.Module, x: Tensor, mode: str) -> Row:
    graph = extract(module, type_of(x))
    graph = differentiate(graph) if mode == "train" else graph
    space = load_search_space(environment_of(x.device).arch)
    recheck(check_plan(framework_plan(graph, space, network=name), graph, space), module, x.device)
    return {"verdict": "right"}


def _compared(name: str, module: nn.Module, x: Tensor, mode: str) -> Row:
    plan = None
    if not x.is_cuda:  # there eager runs what has no plan
        graph = optimize(module, x, mode=mode).pool().graph
        plan = framework_plan(graph, load_search_space("cpu"), network=name)
    tuned = optimize(module, x, mode=mode, plan=plan, fallback="silent")
    with torch.set_grad_enabled(mode == "train"):
        tuned(x)  # the first call makes the program
        torch.manual_seed(SEED)
        made = tuned(x)
    call = tuned.last_call()
    if call.how != "planned":
        return {"verdict": "not run", "reason": f"{call.how}: {call.reason}"}
    if mode == "train":
        return _gradients(tuned, module, x, made)
    result = check(tuned, x)
    return {"verdict": "right", "error": result.error, "bound": result.bound}


def _gradients(tuned: nn.Module, module: nn.Module, x: Tensor, made: Any) -> Row:
    """All gradients of one pass, as one vector: the proof has judged each for itself. With one
    seed all draw the same random numbers.
    """
    ours = _flat(tuned, made)
    theirs, exact = (_flat(*_seeded(*call)) for call in ((module, x), _wide(module, x)))
    size = exact.norm()
    error, framework = (float((found.double() - exact).norm() / size) for found in (ours, theirs))
    bound = 2 * framework + tolerance("gradient", x.dtype)
    if error <= bound:
        return {"verdict": "right", "error": error, "bound": bound}
    reason = f"the gradients are off by {error:.3g} of their size, allowed {bound:.3g}"
    return {"verdict": "wrong", "reason": reason, "error": error, "bound": bound}


def _seeded(module: nn.Module, x: Tensor) -> tuple[nn.Module, Any]:
    torch.manual_seed(SEED)
    return module, module(x)


def _wide(module: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    return copy.deepcopy(module).double(), x.double()


def _flat(module: nn.Module, made: Any) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    leaves = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
    seeds = (torch.randn(y.shape, generator=draw).to(y) for y in leaves)
    torch.autograd.backward(leaves, list(seeds))
    found = (p.grad for p in module.parameters() if p.grad is not None)
    return torch.cat([gradient.flatten() for gradient in found])


def share(name: str, asked: Asked) -> Row:
    """The part of its FLOPs in steps for which there is a kernel beside the framework's, in float16
    at its own image size; nothing runs.
    """
    row, graph = _graph(name, asked)
    if graph is None:
        return row
    covered, total, rest = _flops(graph, load_search_space(asked.arch))
    left = sorted(rest.items(), key=lambda item: -item[1])[:4]
    return {
        **row,
        "arch": asked.arch,
        "gflops": total / 1e9,
        "share": covered / total if total else 1.0,
        "left": {op: round(flops / total, 4) for op, flops in left},
        "nodes": len(graph.nodes),
    }


def _graph(name: str, asked: Asked) -> tuple[Row, Graph | None]:
    side = networks.own_size(name)
    module = networks.build(name).half().train(asked.mode == "train")
    row: Row = {"image": side}
    try:
        graph = extract(module, TensorType((networks.BATCH, 3, side, side), "float16"))
        if asked.mode == "train":
            graph = differentiate(graph)
    except UnsupportedModule as error:
        return {**row, "verdict": "refused", "reason": str(error)}, None
    return {**row, "verdict": "taken"}, graph


def _flops(graph: Graph, space: SearchSpace) -> tuple[int, int, Mapping[str, int]]:
    """What is covered, all, and by op what is not."""
    kernels = _Kernels(graph, space)
    # What depends on weights alone is not part of a pass.
    each = {n: _flops_of(graph, n) for n in graph.nodes if phase_of(graph, n) != "refresh"}
    total, rest = sum(each.values()), dict[str, int]()
    for node, flops in each.items():
        if flops and not kernels.beside_the_framework(node, grouped=flops > COUNTS * total):
            rest[node.op] = rest.get(node.op, 0) + flops
    return total - sum(rest.values()), total, rest


class _Kernels:
    """Which nodes of a graph some kernel beside the framework's can run, alone or in a group."""

    def __init__(self, graph: Graph, space: SearchSpace) -> None:
        self.graph, self.space = graph, space
        # By what a group does: a network repeats its blocks.
        self.known: dict[Any, bool] = {}
        self.in_groups: set[str] | None = None

    def beside_the_framework(self, node: Node, grouped: bool) -> bool:
        return self._has((node,)) or (grouped and node.name in self._grouped())

    def _has(self, group: tuple[Node, ...]) -> bool:
        key = tuple(map(self._alike, group))
        if key not in self.known:
            self.known[key] = self._looked_up(group)
        return self.known[key]

    def _alike(self, node: Node) -> Any:
        types, constants = self.graph.types, self.graph.constants
        inputs = tuple((types[value], value in constants) for value in node.inputs)
        readers = sum(len(self.graph.consumers[value]) for value in node.outputs)
        return node.op, node.attrs, inputs, node.types, readers

    def _looked_up(self, group: tuple[Node, ...]) -> bool:
        if len({phase_of(self.graph, node) for node in group}) > 1:
            return False
        names = tuple(node.name for node in group)
        if not has_kernel(make_step(self.graph, names), self.space):
            return False
        return len(group) == 1 or why_not_group(self.graph, names) is None

    def _grouped(self) -> set[str]:
        """Every node that is covered in some group, looked for once."""
        if self.in_groups is None:
            by_name = {node.name: node for node in self.graph.nodes}
            known = {name for name, node in by_name.items() if self._has((node,))}
            for node in self.graph.nodes:
                for fusion in all_fusions():
                    for group in groups_from(self.graph, node, fusion):
                        nodes = tuple(map(by_name.__getitem__, group))
                        if not known.issuperset(group) and self._has(nodes):
                            known.update(group)
            self.in_groups = known
        return self.in_groups


def has_kernel(step: Step, space: SearchSpace) -> bool:
    """Whether any legal candidate of a step is not the framework's own."""
    return any(
        family.why_not_config(parts, config, space.arch) is None
        for name, family in all_families().items()
        if name not in NOT_OURS
        and family.why_not_arch(space.arch) is None
        and family.why_not_step(step) is None
        for parts in (family.parts(step),)
        for config in family.configs_for(parts, space)
    )


def _flops_of(graph: Graph, node: Node) -> int:
    op = op_named(node.op)
    inputs = [graph.types[value] for value in node.inputs]
    if not isinstance(op, (OverloadOp, OverloadBackward)):
        return op.flops(inputs, node.types, node.attrs)
    tensors = [torch.empty(t.shape, dtype=t.torch_dtype, device="meta") for t in inputs]
    with FlopCounterMode(display=False) as counter:
        op.evaluate(tensors, node.attrs)
    return max(counter.get_total_flops(), sum(type_.numel for type_ in node.types))


MEASURES = {
    "size": size,
    "taken": taken,
    "right": right,
    "called": called,
    "share": share,
    "time": speed.without_plan,
}
