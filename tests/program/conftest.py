"""Random networks with random legal plans, their float64 reference, and a program that spoils
whatever memory it gave free.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from plantune.canonical import Attrs
from plantune.graph.differentiate import differentiate
from plantune.graph.extract import extract
from plantune.graph.fusions import all_fusions
from plantune.graph.graph import Graph
from plantune.graph.partition import alternatives, partition_into, why_not_group
from plantune.graph.step import Step
from plantune.graph.types import TensorType
from plantune.kernels.family import Candidate, KernelFamily
from plantune.kernels.registry import candidates, family_named
from plantune.layers import SpaceToDepth
from plantune.plan import Choice, Plan
from plantune.problem import Problem
from plantune.runtime import memory_plan as memory_module
from plantune.runtime import program as program_module
from plantune.runtime.branches import Branch, Call
from plantune.runtime.memory_plan import Liveness
from plantune.runtime.program import Program
from plantune.runtime.schedule import Launch, Schedule
from plantune.space.search_space import SearchSpace, load_search_space

Results = dict[str, Tensor]
# ReLU and max pooling jump: a value nearer to the edge than this may fall to either side.
EDGE = 5e-6


def scalar(rng: random.Random) -> nn.Parameter:
    return nn.Parameter(torch.tensor([rng.choice((-1, 1)) * rng.uniform(0.5, 1.5)]))


class ConvUnit(nn.Module):
    """A convolution of any kind, with some of: batch norm, scalars, ReLU."""

    def __init__(self, rng: random.Random, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        size = rng.choice((1, 3, 3))
        dilation = rng.choice((1, 1, 2)) if size == 3 and stride == 1 else 1
        groups = rng.choice([g for g in (1, 1, 1, 2, inputs) if inputs % g == outputs % g == 0])
        padding = dilation * (size // 2)
        self.conv = nn.Conv2d(
            inputs, outputs, size, stride, padding, dilation, groups, bias=rng.random() < 0.5
        )
        self.bn = nn.BatchNorm2d(outputs) if rng.random() < 0.4 else nn.Identity()
        self.scale = scalar(rng) if rng.random() < 0.4 else None
        self.bias = scalar(rng) if rng.random() < 0.4 else None
        self.relu = nn.ReLU() if rng.random() < 0.6 else nn.Identity()
        self.offset = scalar(rng) if rng.random() < 0.3 else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = self.bn(self.conv(x))
        y = y if self.scale is None else y * self.scale
        y = y if self.bias is None else y + self.bias
        y = y if residual is None else y + residual
        y = self.relu(y)
        return y if self.offset is None else y + self.offset


class Residual(nn.Module):
    """Two units and the identity, which may be pooled and projected, and may pass a ReLU."""

    def __init__(self, rng: random.Random, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.before = scalar(rng)
        self.first = ConvUnit(rng, inputs, outputs, stride)
        self.second = ConvUnit(rng, outputs, outputs)
        self.down: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.down = nn.Sequential(
                nn.AvgPool2d(3, stride, 1, count_include_pad=rng.random() < 0.5),
                nn.Conv2d(inputs, outputs, 1, bias=rng.random() < 0.5),
            )

    def forward(self, x: Tensor) -> Tensor:
        biased = x + self.before
        return self.second(self.first(biased), self.down(biased))


class Gate(nn.Module):
    """Squeeze and excite, with a residual and a ReLU behind it or not."""

    def __init__(self, rng: random.Random, channels: int) -> None:
        super().__init__()
        self.down = nn.Linear(channels, 5, bias=rng.random() < 0.7)
        self.up = nn.Linear(5, channels, bias=rng.random() < 0.7)
        self.keepdim = rng.random() < 0.5
        self.residual = rng.random() < 0.5
        self.offset = scalar(rng) if rng.random() < 0.5 else None

    def forward(self, x: Tensor) -> Tensor:
        n, c = x.shape[:2]
        pooled = x.mean((2, 3), keepdim=self.keepdim).view(n, c)
        y = x * torch.sigmoid(self.up(torch.relu(self.down(pooled)))).view(n, c, 1, 1)
        y = torch.relu(y + x) if self.residual else y
        return y if self.offset is None else y + self.offset


class Arithmetic(nn.Module):
    """Pointwise ops with numbers, scalars, and a value that is read twice."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.scale, self.bias = scalar(rng), scalar(rng)
        self.number = rng.uniform(0.5, 2)
        self.twice = rng.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(x * self.scale) - self.number * x
        return (y + self.bias) * x if self.twice else y / self.number + self.bias


class Scaled(nn.Module):
    """Images of fewer digits, which are cast and scaled."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("size", torch.rand(channels, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x.half().to(self.size.dtype) * 0.7 / self.size


# Networks of these seeds end with a function or a norm that the others do not have.
LASTS = dict(
    enumerate(
        (
            nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Mish(), nn.ELU(), nn.Softplus(), nn.Tanh(),
            nn.ReLU6(), nn.Hardtanh(), nn.Hardswish(), nn.Hardsigmoid(),
            *map(nn.LeakyReLU, (0.01, 0.1, 0.2)),
            *(nn.Sequential(nn.LayerNorm(5), last) for last in (nn.ReLU(), nn.GELU(), nn.SiLU())),
            *(nn.Sequential(nn.GroupNorm(1, 5), last) for last in (nn.ReLU(), nn.GELU())),
        )
    )
)  # fmt: skip


class RandomNetwork(nn.Module):
    """Some blocks, then a head; a middle value may leave beside the last one."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        channels = self.channels = rng.choice((2, 3, 4))
        self.size = rng.choice((6, 8))
        size, blocks = self.size, []
        if (channels, size) == (3, 8):
            blocks.append(Scaled(channels))
        if rng.random() < 0.3:
            blocks.append(SpaceToDepth(2))
            channels, size = 4 * channels, size // 2
        for _ in range(rng.randint(1, 3)):
            kind = rng.choice(("unit", "unit", "residual", "gate", "arithmetic", "pool"))
            stride, outputs = rng.choice((1, 2)), rng.choice((channels, 4, 6, 8))
            if kind == "unit":
                blocks.append(ConvUnit(rng, channels, outputs, stride))
            elif kind == "residual":
                blocks.append(Residual(rng, channels, outputs, stride))
            else:
                blocks.append(self._other(rng, kind, channels))
                stride, outputs = (2 if kind == "pool" else 1), channels
            channels, size = outputs, -(-size // stride)
        self.blocks = nn.ModuleList(blocks)
        self.middle = rng.randrange(len(blocks)) if rng.random() < 0.4 else None
        pooled = rng.random() < 0.7
        self.pool = nn.AdaptiveAvgPool2d((1, 1)) if pooled else nn.Identity()
        self.head = nn.Linear(channels if pooled else channels * size * size, 5)
        self.last = rng.choice((nn.ReLU(), nn.Sigmoid(), nn.Identity()))

    @staticmethod
    def _other(rng: random.Random, kind: str, channels: int) -> nn.Module:
        if kind == "gate":
            return Gate(rng, channels)
        if kind == "arithmetic":
            return Arithmetic(rng)
        return rng.choice((nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 2, 1)))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        middle = None
        for index, block in enumerate(self.blocks):
            x = block(x)
            middle = x if index == self.middle else middle
        y = self.last(self.head(self.pool(x).flatten(1)))
        return y if middle is None else (middle, y)


def randomise(module: nn.Module, seed: int) -> nn.Module:
    """Weights, statistics and scalars without which every result would be another."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if not tensor.is_floating_point():
                continue
            normal = torch.randn(tensor.shape, generator=generator)
            uniform = torch.rand(tensor.shape, generator=generator) + 0.5
            if tensor.dim() > 1:
                tensor.copy_(normal * (1.5 / tensor[0].numel()) ** 0.5)
            elif "var" in name or name.endswith(("bn.weight", "scale")):
                tensor.copy_(uniform)
            else:
                tensor.copy_(uniform * normal.sign() * 0.5)
    return module


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


class EarlyLanes:
    """Branches run as soon as they may, before the launches beside them. Only in a `Poisoned`."""

    def __init__(self, branches: Iterable[Branch], device: torch.device) -> None:
        self._when = {branch.launch: self.when(branch) for branch in branches}

    @staticmethod
    def when(branch: Branch) -> int:
        return branch.beside[0]

    def ordered(self, calls: Sequence[list[Call]], places: range) -> list[Call]:
        order = []
        for place in places:
            spoil, *own, drop = calls[place]
            order.append(spoil)
            for launch in places:
                if self._when.get(launch) == place:
                    order += calls[launch][1:-1]
            order += [*([] if place in self._when else own), drop]
        return order


class LateLanes(EarlyLanes):
    """Branches run as late as they may, behind all but one of the launches beside them."""

    @staticmethod
    def when(branch: Branch) -> int:
        return branch.beside[-1]


LANES = (EarlyLanes, LateLanes)


class PoisonedProgram(Program):
    """Spoils each buffer as soon as its liveness calls it free, and all of them before a pass."""

    def __init__(
        self, graph: Graph, plan: Plan, space: SearchSpace, lanes: type[EarlyLanes] | None = None
    ) -> None:
        self._when = 0
        self._live = Liveness((), (), ())
        if lanes is not None:
            plan = replace(plan, branches=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(program_module, "liveness", self._recorded)
            if lanes is not None:
                patch.setattr(program_module, "Lanes", lanes)
            super().__init__(graph, plan, space)

    def _recorded(self, schedule: Schedule, branches: Iterable[Branch]) -> Liveness:
        self._live = memory_module.liveness(schedule, branches)
        return self._live

    def _calls(
        self, launch: Launch, space: SearchSpace, drops: Sequence[str] = ()
    ) -> list[Callable[[], None]]:
        calls = super()._calls(launch, space)
        if launch.step.phase == "refresh":
            return calls
        when, self._when = self._when, self._when + 1
        free = [b.name for b in self._live.buffers if when == 0 or b.last == when - 1]

        def spoil() -> None:
            for name in free:
                value = self.values[name]
                value.fill_(torch.nan if value.is_floating_point() else 0)

        def drop() -> None:
            for name in drops:
                del self.values[name]

        return [spoil, *calls, drop]


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
