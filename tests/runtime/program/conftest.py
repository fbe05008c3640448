"""Random networks with random legal plans, and their float64 reference."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from plantune.base.canonical import Attrs
from plantune.graph.fusions import all_fusions
from plantune.graph.graph import Graph
from plantune.graph.partition import alternatives, partition_into, why_not_group
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.step import Step
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.kernels.family import Candidate, KernelFamily
from plantune.kernels.registry import candidates, family_named
from plantune.plans.plan import Choice, Plan
from plantune.plans.problem import Problem
from plantune.runtime.program.program import Program
from plantune.space.search_space import SearchSpace, load_search_space

from .networks import LASTS, RandomNetwork, randomise
from .poisoned import LANES, EarlyLanes, PoisonedProgram

Results = dict[str, Tensor]
# ReLU and max pooling jump: a value nearer to the edge than this may fall to either side.
EDGE = 5e-6


def random_partition(graph: Graph, rng: random.Random) -> tuple[Step, ...]:
    """Any groups that the fusions offer and that fit each other."""
    offers = [step for step in alternatives(graph, all_fusions()) if len(step.nodes) > 1]
    rng.shuffle(offers)
    offers.sort(key=lambda step: -len(step.nodes) * (rng.random() < 0.5))
    taken: list[tuple[str, ...]] = []
    covered: set[str] = set()
    for step in offers[: rng.randint(0, len(offers))]:
        group = tuple(node.name for node in step.nodes)
        if covered.isdisjoint(group) and why_not_group(graph, group, taken) is None:
            taken.append(group)
            covered.update(group)
    rest = [(node.name,) for node in graph.nodes if node.name not in covered]
    return partition_into(graph, [*taken, *rest])


def compiles(family: KernelFamily) -> bool:
    return type(family).build is not KernelFamily.build


def _random_plan(graph: Graph, space: SearchSpace, rng: random.Random, compiled: bool) -> Plan:
    def draw(step: Step) -> Candidate:
        legal = candidates(step, space)
        names = sorted(
            {c.family for c in legal if compiled or not compiles(family_named(c.family))}
        )
        name = rng.choice(names)
        return rng.choice([c for c in legal if c.family == name])

    steps = random_partition(graph, rng)
    choices = [Choice(tuple(node.name for node in step.nodes), draw(step)) for step in steps]
    return Plan(Problem.of(graph, space.arch.name, "random"), tuple(choices))


@dataclass
class Case:
    """A network, a plan of it, and one call's data."""

    module: nn.Module
    graph: Graph
    plan: Plan
    x: Tensor
    output_gradients: dict[str, Tensor]

    def state(self) -> dict[str, Tensor]:
        """Fresh copies of all parameters and buffers."""
        tensors = (*self.module.named_parameters(), *self.module.named_buffers())
        return {name: tensor.detach().clone() for name, tensor in tensors}

    def eager(self, dtype: torch.dtype) -> Results:
        """What torch makes: outputs, gradients, and buffers afterwards."""
        module = copy.deepcopy(self.module).to(dtype)
        x = self.x.detach().to(dtype).requires_grad_()
        outputs = module(x)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        results = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
        if self.graph.backward_from is not None:
            seeds = [self.output_gradients[f"d({name})"].to(dtype) for name in self.graph.outputs]
            torch.autograd.backward(outputs, seeds)
            known = {"x": x, **dict(module.named_parameters())}
            results |= {f"d({name})": known[name].grad for name, _ in self.graph.gradients}
        return results | {f"buffer {name}": b for name, b in module.named_buffers()}

    def run(self, program: Program) -> Results:
        """What a program makes of the same."""
        state = self.state()
        program.refresh(state)
        outputs = program.forward(self.x)
        results = {f"output {i}": y for i, y in enumerate(outputs)}
        if self.graph.backward_from is not None:
            seeds = [self.output_gradients[name] for name, _ in self.graph.output_gradients]
            gradients = program.backward(*seeds)
            results |= {f"d({name})": gradient for name, gradient in gradients.items()}
        buffers = dict(self.module.named_buffers())
        return results | {f"buffer {name}": b for name, b in state.items() if name in buffers}

    def is_on_edge(self) -> bool:
        """Whether rounding may decide what a ReLU or a max pool takes."""
        values = {name: tensor.double() for name, tensor in self.state().items()}
        values["x"] = self.x.double()
        whole = self.graph.nodes[: self.graph.backward_from]
        step = Step(whole, tuple(self.graph.sources), (), frozenset(), "forward")
        values = step.evaluate(values)
        for node in whole:
            tested = values[node.inputs[0]].abs() if node.op == "relu" else torch.ones(())
            if node.op == "max_pool2d":
                tested = _gaps(values[node.inputs[0]], node.attrs)
            if ((tested > 0) & (tested < EDGE)).any():
                return True
        return False


def _gaps(x: Tensor, attrs: Attrs) -> Tensor:
    """How far the largest of each window is from the next."""
    pad = [attrs["padding"][1]] * 2 + [attrs["padding"][0]] * 2
    padded = nn.functional.pad(x, pad, value=-1e30).flatten(0, 1).unsqueeze(1)
    columns = nn.functional.unfold(padded, attrs["kernel"], stride=attrs["stride"])
    first, second = columns.topk(2, dim=1).values.unbind(1)
    return first - second


def make_case(seed: int, mode: str, space: SearchSpace, compiled: bool = False) -> Case:
    """The random case of a seed: mode "infer", "eval" (with gradients) or "train"."""
    for attempt in range(20):
        rng = random.Random(f"{seed} {mode} {attempt}")
        module = randomise(RandomNetwork(rng), seed).train(mode == "train")
        module.last = LASTS.get(seed, module.last)
        batch = rng.choice((1, 2, 3)) + (mode == "train")
        type_ = TensorType((batch, module.channels, module.size, module.size))
        graph = extract(module, type_, fold=mode == "infer")
        if mode != "infer":
            graph = differentiate(graph, ["x", *(name for name, _ in graph.parameters)])
        plan = _random_plan(graph, space, rng, compiled)
        noise = torch.Generator().manual_seed(1000 * seed + attempt)
        x = torch.randn(type_.shape, generator=noise)
        seeds = {name: torch.randn(t.shape, generator=noise) for name, t in graph.output_gradients}
        case = Case(module, graph, plan, x, seeds)
        if not case.is_on_edge():
            return case
    raise AssertionError(f"seed {seed}: every draw is on an edge")


def _why_wrong(case: Case, results: Results) -> str | None:
    """Which result is further from float64 than rounding explains: twice torch's own error, and
    some roundings of the result and of the gradients that it is summed with.
    """
    exact, torchs = case.eager(torch.float64), case.eager(torch.float32)
    if results.keys() != exact.keys():
        return f"got {sorted(results)}, not {sorted(exact)}"
    norms = [float(v.norm()) for name, v in exact.items() if name.startswith("d(")]
    typical = max(norms, default=0.0)
    for name, wanted in exact.items():
        result = results[name]
        if result.shape != wanted.shape:
            return f"{name} has shape {result.shape}"
        if not wanted.is_floating_point():
            if not torch.equal(result, wanted):
                return f"{name} is {result}, not {wanted}"
            continue
        error = (result.double() - wanted).norm()
        own = (torchs[name].double() - wanted).norm()
        allowed = 2 * own + 2e-5 * wanted.norm() + 2e-6 * typical * name.startswith("d(")
        if not error <= allowed:
            return f"{name}: error {error:.3g}, allowed {allowed:.3g}, size {wanted.norm():.3g}"
    return None


@pytest.fixture(scope="session")
def space() -> SearchSpace:
    return load_search_space("cpu")


@pytest.fixture(scope="session")
def case_of(space) -> Callable[..., Case]:
    made: dict[tuple[object, ...], Case] = {}

    def make(seed: int, mode: str, compiled: bool = False) -> Case:
        key = (seed, mode, compiled)
        if key not in made:
            made[key] = make_case(seed, mode, space, compiled)
        return made[key]

    return make


@pytest.fixture
def why_wrong() -> Callable[[Case, Results], str | None]:
    return _why_wrong


@pytest.fixture
def poisoned() -> type[PoisonedProgram]:
    return PoisonedProgram


@pytest.fixture
def all_lanes() -> tuple[type[EarlyLanes], ...]:
    """Branches as early and as late as they may run."""
    return LANES


@pytest.fixture(params=LANES)
def lanes(request: pytest.FixtureRequest) -> type[EarlyLanes]:
    kind: type[EarlyLanes] = request.param
    return kind


@pytest.fixture
def random_plan(space: SearchSpace) -> Callable[[Graph, random.Random], Plan]:
    return lambda graph, rng: _random_plan(graph, space, rng, compiled=False)
