"""What torch makes as a view stays one where nothing needs it dense, and nothing else does."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plantune.graph.ops.history import owned
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.kernels.weights.pitch import pitch_of
from plantune.plans.checked_plan import check_plan
from plantune.plans.guess import Preference, compose, framework_plan, hand_plan
from plantune.runtime.program.program import Program
from plantune.runtime.program.schedule import make_schedule
from plantune.space.search_space import load_search_space


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        qkv = self.qkv(x).reshape(n, tokens, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return x + self.out(y.reshape(n, tokens, width))


class Shuffle(nn.Module):
    """A unit of ShuffleNet: one half goes past a convolution."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        past, through = (x + 1).chunk(2, 1)
        return torch.cat((past, F.relu(self.conv(through))), 1) * 2


class Slices(nn.Module):
    """Views of views, one that leaves, and one that is read in several ways."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        rows = y[:, 1:3]
        one = rows.select(2, 1)
        turned = y.transpose(0, 1)[1].unsqueeze(0).expand(3, -1, -1)
        return one, one.exp() + 1, turned.sum(2) * rows.mean(), torch.cat([rows, rows.exp()], 1)


class Inputs(nn.Module):
    """A view of the input, which its gradient reads."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 1:].exp().square()


NETWORKS = {
    "attention": (Attention, (2, 5, 8)),
    "shuffle": (Shuffle, (2, 8, 5, 5)),
    "slices": (Slices, (2, 4, 3)),
    "inputs": (Inputs, (3, 4)),
}


def graph_of(name: str, mode: str):
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    module = make()
    graph = extract(module, TensorType(shape))
    return module, differentiate(graph, all_sources(graph)) if mode == "train" else graph


def all_sources(graph):
    return [name for name, _ in (*graph.inputs, *graph.parameters)]


def loose_of(graph, plan, space) -> dict[str, str]:
    """Each op of which something is left as torch makes it, with the ops that it is a view of."""
    ops = {value: node.op for node in graph.nodes for value in node.outputs}
    launches = make_schedule(check_plan(plan, graph, space)).launches
    return {
        launch.step.ops[0]: ops.get(launch.aliases.get(name, ""), "")
        for launch in launches
        for name in launch.loose
    }


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("name", NETWORKS)
def test_any_plan_is_right_where_memory_is_spoiled(name, mode, poisoned, random_plan, space):
    module, graph = graph_of(name, mode)
    plans = [random_plan(graph, random.Random(seed)) for seed in range(3)]
    for plan in (framework_plan(graph, space, network=name), *plans):
        program = poisoned(graph, plan, space)
        program.refresh(dict(module.named_parameters()))
        for _ in range(2):
            x = torch.randn(NETWORKS[name][1], requires_grad=True)
            made = module(x)
            wanted = made if isinstance(made, tuple) else (made,)
            got = program.forward(x.detach())
            torch.testing.assert_close(got, tuple(y.detach() for y in wanted))
            if mode == "infer":
                continue
            seeds = [torch.randn_like(y) for y in wanted]
            sources = {"x": x, **dict(module.named_parameters())}
            exact = torch.autograd.grad(wanted, list(sources.values()), seeds)
            found = program.backward(*seeds)
            for source, gradient in zip(sources, exact, strict=True):
                torch.testing.assert_close(found[source], gradient, rtol=1e-4, atol=1e-5)


def test_attention_copies_none_of_its_parts(space):
    _, graph = graph_of("attention", "infer")
    plan = hand_plan(graph, space, network="attention", without=("gemm",))
    attention = "aten.scaled_dot_product_attention.default"
    assert loose_of(graph, plan, space) == {
        "permute": attention,
        "aten.unbind.int": "permute",
        attention: "",
    }
    schedule = make_schedule(check_plan(plan, graph, space))
    assert not any(launch.conversions for launch in schedule.launches)


def test_only_the_half_that_a_convolution_reads_is_copied(space):
    _, graph = graph_of("shuffle", "infer")
    plan = framework_plan(graph, space, network="shuffle")
    launches = make_schedule(check_plan(plan, graph, space)).launches
    chunk = next(launch for launch in launches if launch.step.ops == ("aten.chunk.default",))
    assert chunk.loose == {"aten.chunk.default"}
    assert chunk.aliases == {"aten.chunk.default": "affine"}


def test_outputs_may_be_views_of_which_callers_get_copies(space):
    _, graph = graph_of("slices", "infer")
    plan = framework_plan(graph, space, network="slices")
    assert "aten.select.int" in loose_of(graph, plan, space)
    program = Program(check_plan(plan, graph, space))
    program.refresh({})
    found = program.forward(x := torch.randn(2, 4, 3))
    assert all(y.is_contiguous() for y in found)
    storages = [y.untyped_storage().data_ptr() for y in (x, *program.values.values(), *found)]
    assert len({*storages[-len(found) :]}) == len(found)
    assert {*storages[-len(found) :]}.isdisjoint(storages[: -len(found)])


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_what_is_permuted_last_is_never_moved(space, layout):
    """A view is all that the caller's copy is made of."""

    class Pixels(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).permute(0, 2, 3, 1)

    graph = extract(Pixels(nn.Conv2d(3, 4, 1)), TensorType((2, 3, 5, 5)))
    views = Preference("view"), Preference("framework", {"layout": layout})
    plan = compose(graph, space, network="pixels", fusions=(), preferences=views)
    assert [choice.candidate.family for choice in plan.choices][-1] == "view"
    last = make_schedule(check_plan(plan, graph, space)).launches[-1]
    assert (last.step.ops, last.conversions) == (("permute",), ())
    assert last.loose == last.aliases.keys() == {*graph.outputs}


def test_a_slice_is_copied_where_the_layout_that_is_asked_for_moves_nothing(space):
    """Of one channel both layouts are the same, so there is no conversion that would copy it."""

    class Half(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[:, :, :2])

    module = Half(nn.Conv2d(1, 4, 1))
    graph = extract(module, TensorType((2, 1, 4, 3)))
    preferences = (
        Preference("gemm", {"layout": "nhwc"}),
        Preference("framework", {"layout": "nchw"}),
    )
    plan = compose(graph, space, network="half", fusions=(), preferences=preferences)
    assert "gemm" in {choice.candidate.family for choice in plan.choices}
    program = Program(check_plan(plan, graph, space))
    program.refresh(dict(module.named_parameters()))
    x = torch.randn(2, 1, 4, 3)
    torch.testing.assert_close(program.forward(x)[0], module(x).detach())


class Turned(nn.Module):
    """Keeps a view of its result, and has one as the gradient of its input."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = (x * 2).T
        self.last.copy_(y.detach())
        return y


def test_what_buffers_and_gradients_become_is_dense(space):
    module = Turned()
    graph = differentiate(extract(module, TensorType((3, 4)), fold=False), ["x"])
    plan = framework_plan(graph, space, network="turned")
    schedule = make_schedule(check_plan(plan, graph, space))
    loose = {name for launch in schedule.launches for name in launch.loose}
    assert loose.isdisjoint(value for _, value in (*graph.updates, *graph.gradients))


@pytest.mark.parametrize(("mode", "views"), [("infer", True), ("train", False)])
def test_in_training_no_view_of_an_input_stays(space, mode, views):
    """The caller may overwrite the input between the passes."""
    _, graph = graph_of("inputs", mode)
    plan = framework_plan(graph, space, network="inputs")
    assert ("aten.slice.Tensor" in loose_of(graph, plan, space)) == views


class Dual(nn.Module):
    """As in a dual path network: of two convolutions a part is added, a part is joined."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 24, 1), nn.Conv2d(16, 24, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, y = self.first(x), self.second(x)
        added = x[:, :16] + y[:, :16]
        joined = torch.cat([x[:, 16:], y[:, 16:], added], 1)
        return added, joined, torch.cat([y, x[:, ::3]], 1)


def test_kernels_read_slices_of_channels_in_place():
    graph = extract(Dual().half().eval(), TensorType((2, 16, 8, 8), "float16", "nhwc"))
    space = load_search_space("sm90")
    plan = hand_plan(graph, space, network="dual")
    launches = make_schedule(check_plan(plan, graph, space)).launches
    families = {launch.step.ops[0]: launch.candidate.family for launch in launches}
    assert families["aten.cat.default"] == "concat"
    assert families["add"] == "pointwise"
    loose = {name for launch in launches for name in launch.loose}
    dense = {n for launch in launches for n, _ in launch.step.outputs if "slice" in n} - loose
    assert len(loose) == 4
    # Every third channel is no slice of neighbours.
    (strided,) = (node for node in graph.nodes if node.name in dense)
    assert '"step":3' in strided.attrs["arguments"]


@pytest.mark.parametrize("shape", [(2, 24, 5, 3), (1, 24, 5, 3), (1, 24, 1, 3), (2, 24, 1, 1)])
def test_a_slices_pitch_is_its_images_width(shape):
    image = torch.empty(shape).contiguous(memory_format=torch.channels_last)
    assert pitch_of(image) == 24
    slice_ = image[:, 8:16]
    pixels = shape[0] * shape[2] * shape[3]
    assert pitch_of(slice_) == (24 if pixels > 1 else 8)


def test_a_copy_of_a_slice_keeps_its_order():
    image = torch.randn(2, 24, 5, 3).contiguous(memory_format=torch.channels_last)
    (copied,) = owned([image[:, 8:16]], [image])
    assert copied.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(copied, image[:, 8:16])
    (rows,) = owned([image.contiguous()[:, :, 1:3]], [])
    assert rows.is_contiguous()
