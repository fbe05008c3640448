from __future__ import annotations

import copy
import random
from collections import Counter

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from plantune.errors import InvalidPlan
from plantune.graph.fusions import all_fusions, fusions_named
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.step import make_step
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.kernels.registry import family_named
from plantune.models.se_resnet9 import se_resnet9_fixup
from plantune.plans.checked_plan import check_plan
from plantune.plans.guess import Preference, compose, framework_plan
from plantune.runtime.program.program import Program

BATCH = TensorType((2, 3, 64, 64))
WRITING = (
    Preference("onednn_conv", {"layout": "nhwc", "prepack": True}),
    Preference("gemm"),
)


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    module = se_resnet9_fixup(base_planes=16).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(noise * parameter[0].numel() ** -0.5 if parameter.dim() > 1 else noise)
    return module


@pytest.fixture(scope="module")
def trained(network):
    return differentiate(extract(network, BATCH), ["x", *dict(network.named_parameters())])


@pytest.fixture
def program_of(space):
    def make(graph, plan=None, module=None):
        plan = plan or framework_plan(graph, space, network="test")
        program = Program(check_plan(plan, graph, space))
        if module is not None:
            program.refresh(state_of(module))
        return program

    return make


def state_of(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def reference(module, x, seed, dtype=torch.float64):
    module = copy.deepcopy(module).to(dtype)
    x = x.to(dtype).requires_grad_()
    y = module(x)
    y.backward(seed.to(dtype))
    return {"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in module.named_parameters()}}


@pytest.mark.parametrize("plan", ["default", "fused", *range(4)])
def test_se_resnet9_forward_and_all_gradients(
    network, trained, space, program_of, random_plan, plan
):
    plans = {
        "default": lambda: framework_plan(trained, space, network="test"),
        "fused": lambda: compose(
            trained, space, network="test", fusions=all_fusions(), preferences=WRITING
        ),
    }
    chosen = plans.get(plan, lambda: random_plan(trained, random.Random(plan)))()
    program = program_of(trained, chosen, network)
    x, seed = torch.randn(BATCH.shape), torch.randn(trained.types[trained.outputs[0]].shape)
    results = {"y": program.forward(x)[0], **program.backward(seed)}
    exact = reference(network, x, seed)
    torchs = reference(network, x, seed, torch.float32)
    assert results.keys() == exact.keys()
    for name, wanted in exact.items():
        error, own = ((r[name].double() - wanted).norm() for r in (results, torchs))
        assert error <= 2 * own + 2e-5 * wanted.norm(), name


def test_backward_twice_gives_the_same(network, trained, program_of):
    program = program_of(trained, module=network)
    seed = torch.randn(trained.types[trained.outputs[0]].shape)
    program.forward(torch.randn(BATCH.shape))
    first, second = program.backward(seed), program.backward(seed)
    other = program.backward(2 * seed)
    for name, gradient in first.items():
        assert torch.equal(gradient, second[name])
        torch.testing.assert_close(other[name], 2 * gradient)


@pytest.mark.parametrize("mode", ["infer", "eval", "train"])
@pytest.mark.parametrize("seed", range(10))
def test_results_belong_to_the_caller(case_of, space, seed, mode):
    """Later calls do not change them, and changing them does not change later calls."""
    case = case_of(seed, mode)
    program = Program(check_plan(case.plan, case.graph, space))
    state = case.state()
    program.refresh(state)
    seeds = list(case.output_gradients.values())
    first = call(program, case.x, seeds)
    kept = [result.clone() for result in first]
    call(program, case.x + 1, seeds)
    assert all(map(torch.equal, first, kept))
    outputs = program.forward(case.x)
    for output in outputs:
        output.fill_(torch.nan)
    if case.graph.backward_from is not None:
        for gradient in program.backward(*seeds).values():
            gradient.fill_(torch.nan)
        again = [*program.backward(*seeds).values()]
        assert all(map(torch.equal, again, kept[len(outputs) :]))
    for (name, tensor), (_, before) in zip(state.items(), case.state().items(), strict=True):
        moving = name in {buffer for buffer, _ in case.graph.updates}
        assert moving or torch.equal(tensor, before), name


def call(program, x, seeds):
    outputs = program.forward(x)
    if program.graph.backward_from is None:
        return list(outputs)
    return [*outputs, *program.backward(*seeds).values()]


@pytest.mark.parametrize("mode", ["infer", "eval", "train"])
def test_results_share_no_memory(case_of, space, mode):
    for seed in range(10):
        case = case_of(seed, mode)
        program = Program(check_plan(case.plan, case.graph, space))
        state = case.state()
        program.refresh(state)
        results = call(program, case.x, list(case.output_gradients.values()))
        held = [t for t in program.values.values() if isinstance(t, torch.Tensor)]
        addresses = Counter(t.untyped_storage().data_ptr() for t in (*results, case.x))
        assert max(addresses.values()) == 1
        assert addresses.keys().isdisjoint(
            t.untyped_storage().data_ptr() for t in held if t is not case.x
        )
        assert all(result.is_contiguous() for result in results)


def test_inputs_and_their_gradients_are_only_read(network, trained, program_of):
    program = program_of(trained, module=network)
    x, seed = torch.randn(BATCH.shape), torch.randn(trained.types[trained.outputs[0]].shape)
    given = x.clone(), seed.clone()
    program.forward(x)
    program.backward(seed)
    assert torch.equal(x, given[0])
    assert torch.equal(seed, given[1])


def test_running_statistics_are_updated_in_place(case_of, space):
    case = next(c for c in (case_of(seed, "train") for seed in range(25)) if c.graph.updates)
    program = Program(check_plan(case.plan, case.graph, space))
    state = case.state()
    program.refresh(state)
    module = copy.deepcopy(case.module).double()
    for _ in range(3):
        program.forward(case.x)
        module(case.x.double())
    for name, wanted in module.named_buffers():
        torch.testing.assert_close(state[name].to(wanted.dtype), wanted, rtol=1e-5, atol=1e-6)
        assert not torch.equal(state[name], case.state()[name])


def test_backward_adds_nothing_to_statistics(case_of, space):
    case = next(c for c in (case_of(seed, "train") for seed in range(25)) if c.graph.updates)
    program = Program(check_plan(case.plan, case.graph, space))
    state = case.state()
    program.refresh(state)
    program.forward(case.x)
    after = {name: tensor.clone() for name, tensor in state.items()}
    program.backward(*case.output_gradients.values())
    assert all(torch.equal(state[name], tensor) for name, tensor in after.items())


def test_new_weights_count_after_a_refresh(network, program_of):
    graph = extract(network, BATCH)
    changed = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(1.1)
    program, x = program_of(graph, module=network), torch.randn(BATCH.shape)
    before = program.forward(x)[0]
    program.refresh(state_of(changed))
    after = program.forward(x)[0]
    with torch.no_grad():
        torch.testing.assert_close(before, network(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(after, changed(x), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before, after, rtol=1e-2)


class SharedWeight(nn.Module):
    """A convolution whose weight also serves a linear layer, through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)

    def forward(self, x):
        y = torch.relu(self.conv(x)).mean((2, 3))
        return nn.functional.linear(y.t(), self.conv.weight.view(-1, x.shape[0]))


def test_weights_may_lie_channels_last(space, program_of):
    """As `module.to(memory_format=torch.channels_last)` leaves them."""
    module = SharedWeight().eval().to(memory_format=torch.channels_last)
    assert not module.conv.weight.is_contiguous()
    type_ = TensorType((2, 3, 5, 5))
    graph = differentiate(extract(module, type_, fold=False))
    program, x = program_of(graph, module=module), torch.randn(type_.shape)
    twin = SharedWeight()
    twin.load_state_dict(module.state_dict())
    twin.conv.weight.data = twin.conv.weight.data.contiguous()
    y = twin(x)
    torch.testing.assert_close(program.forward(x)[0], y)
    y.backward(seed := torch.randn(y.shape))
    for name, gradient in program.backward(seed).items():
        torch.testing.assert_close(gradient, twin.get_parameter(name).grad, rtol=1e-4, atol=1e-5)


def test_a_plan_that_does_not_fit_is_refused(network, trained, space):
    forward = extract(network, BATCH)
    with pytest.raises(InvalidPlan, match="for other layers"):
        Program(check_plan(framework_plan(forward, space, network="test"), trained, space))


def allocations(call) -> list[int]:
    """The sizes of what a call allocated."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    events = seen.profiler.kineto_results.events()
    return [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0]


class Products(nn.Module):
    """1x1 convolutions, a gate and linear layers: all of it can be written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 1, bias=False)
        self.gate, self.head = nn.Linear(8, 8), nn.Linear(8, 5)
        self.bias = nn.Parameter(torch.ones(1))

    def forward(self, x):
        y = self.conv2(torch.relu(self.conv1(x)) + self.bias)
        y = nn.functional.avg_pool2d(y, 2)
        y = nn.functional.max_pool2d(torch.relu(y) - y * self.bias, 2).flatten(1)
        return self.head(y * torch.sigmoid(self.gate(y)))


def test_a_call_of_writing_kernels_allocates_only_what_it_hands_out(space, program_of):
    module = Products().eval()
    type_ = TensorType((2, 4, 4, 4))
    graph = extract(module, type_)
    plan = compose(
        graph,
        space,
        network="test",
        fusions=fusions_named("linear", "conv_epilogue"),
        preferences=WRITING[1:],
    )
    assert {c.candidate.family for c in plan.choices} == {"gemm", "framework", "view"}
    program, x = program_of(graph, plan, module), torch.randn(type_.shape)
    (output,) = program.forward(x)
    made = allocations(lambda: program.forward(x))
    assert made == [output.numel() * output.element_size()]


def test_onednn_allocates_nothing_but_its_scratchpad(network, space, program_of):
    graph = extract(network, BATCH)
    fusions = fusions_named("conv_epilogue", "linear")
    plan = compose(graph, space, network="test", fusions=fusions, preferences=WRITING)
    assert not any(
        family_named(c.candidate.family).adopts(
            family_named(c.candidate.family).parts(step), c.candidate.config
        )
        for c in plan.choices
        for step in [make_step(graph, c.nodes)]
    )
    program, x = program_of(graph, plan, network), torch.randn(BATCH.shape)
    (output,) = program.forward(x)
    made = Counter(allocations(lambda: program.forward(x)))
    # torch's mean keeps its divisor in a tensor.
    large = {size: n for size, n in made.items() if size > 8}
    assert large.pop(output.numel() * 4) == 1
    # oneDNN takes a scratchpad for each convolution, of a size that depends on the kind of CPU.
    assert len(large) <= 1
    counts = Counter(c.candidate.family for c in plan.choices)
    assert sum(large.values()) <= counts["onednn_conv"]
    assert all(size < x.numel() * 4 for size in large), "as large as an image"


def test_a_backward_pass_allocates_only_gradients_and_what_torch_adopts(
    network, trained, program_of
):
    """The default plan: torch's convolutions and their gradients make memory of their own."""
    program, x = program_of(trained, module=network), torch.randn(BATCH.shape)
    seed = torch.randn(trained.types[trained.outputs[0]].shape)

    def run():
        return [*program.forward(x), *program.backward(seed).values()]

    handed = sum(t.numel() * t.element_size() for t in run())
    made = sum(allocations(run))
    convolutions = [n for n in trained.nodes if n.op.startswith("conv2d")]
    # What torch's convolutions make, and what they reorder for it.
    adopted = sum(n.types[0].size_bytes for n in convolutions)
    weights = sum(t.size_bytes for name, t in trained.parameters)
    assert made <= handed + 4 * (adopted + weights)


def test_buffers_stay_where_they_are(case_of, space):
    """Only what kernels adopt may lie elsewhere in another call."""
    for seed in range(10):
        case = case_of(seed, "train")
        program = Program(check_plan(case.plan, case.graph, space))
        program.refresh(case.state())
        seeds = list(case.output_gradients.values())
        call(program, case.x, seeds)
        places = {name: t.data_ptr() for name, t in program.values.items()}
        call(program, case.x, seeds)
        again = {name: t.data_ptr() for name, t in program.values.items()}
        assert places.keys() == again.keys()
        moved = {name for name, place in places.items() if again[name] != place}
        adopted = {
            name
            for c in case.plan.choices
            for name in family_named(c.candidate.family).adopts(
                family_named(c.candidate.family).parts(make_step(case.graph, c.nodes)),
                c.candidate.config,
            )
        }
        views = {n.name for n in case.graph.nodes if n.op == "reshape"}
        assert moved <= adopted | views


class Older(nn.Module):
    """Keeps what another of its buffers was."""

    def __init__(self):
        super().__init__()
        self.register_buffer("now", torch.zeros(3))
        self.register_buffer("before", torch.ones(3))

    def forward(self, x):
        self.before.copy_(self.now)
        self.now.copy_(x.mean(0))
        return x * 2


def test_a_buffer_that_becomes_what_another_was_does_not_get_what_that_becomes(space):
    module = Older()
    wanted = copy.deepcopy(module)
    graph = extract(module, TensorType((4, 3)))
    assert ("before", "now") in graph.updates
    program = Program(check_plan(framework_plan(graph, space, network="x"), graph, space))
    program.refresh(dict(module.named_buffers()))
    for _ in range(2):
        x = torch.randn(4, 3)
        program.forward(x)
        wanted(x)
        assert torch.equal(module.now, wanted.now)
        assert torch.equal(module.before, wanted.before)


def test_a_step_that_reads_a_view_of_a_value_at_rest_runs_alone(program_of, monkeypatch):
    """As a linear layer after a pool: its output can be written where a caller has it."""
    monkeypatch.setattr(type(family_named("framework")), "launches_kernels", True)
    layers = nn.Conv2d(3, 4, 3), nn.Sigmoid(), nn.Flatten(), nn.Tanh()
    program = program_of(extract(nn.Sequential(*layers).eval(), TensorType((2, 3, 5, 5))))
    values, (result,) = program.values, program.graph.outputs
    assert program.touching(result) == (result,)
    before = dict(values)
    source = values["1/sigmoid"].copy_(torch.randn(2, 4, 3, 3))
    program.run_step(result)
    assert values == before  # the same tensors
    assert torch.equal(values[result], source.flatten(1).tanh())
